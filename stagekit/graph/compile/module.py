"""A stage as a module to run: its own parameters and buffers under their original names, its graph in buckets.

`make_stage_module` is the only place of stagekit.graph that makes real tensors for training. It materialises what one
stage owns and nothing else. Called through `Cut.stage_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from stagekit.errors import UserError
from stagekit.graph.bucket import split
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.capture.functions import traits_of
from stagekit.graph.compile.compilers import AUTO, check_backend, compile_problem
from stagekit.graph.compile.deferred import Deferred, DeferredLog, mark, with_notes
from stagekit.graph.compile.failures import note_line
from stagekit.graph.compile.randomness import functional_dropout
from stagekit.graph.compile.written import reread_states, written_states
from stagekit.graph.cut.stages import StageGraph, stage_fakes
from stagekit.graph.values.build import named_tensors
from stagekit.plan.contract import Bucket, StageSpec
from stagekit.synced import SyncedBatchNorm

if TYPE_CHECKING:
    from stagekit.graph.cut.cut import Cut


class StageModule(nn.Module):
    """Runs one stage: `module(*inputs)` in the order of `StageSpec.inputs` returns a tuple of tensors.

    `state_dict()` has the names of the unsplit model. `buckets` is `StageSpec.buckets`.
    """

    buckets: tuple[Bucket, ...]
    synced_channels: tuple[int, ...]  # of each SyncBatchNorm that a forward calls
    _run: Callable[..., tuple[Tensor, ...]]
    _compile_with: Callable[[str, DeferredLog | None], Callable[..., Any]]
    _backend = "eager"

    def __init__(
        self, spec: StageSpec, tensors: Mapping[str, Tensor], buffers: frozenset[str], persistent: frozenset[str]
    ) -> None:
        super().__init__()
        object.__setattr__(self, "buckets", spec.buckets)
        object.__setattr__(self, "_run", None)
        self._seed_base: tuple[int | Tensor, ...] = ()
        self._takes_tensor_seed = self._draws = False
        self._has_regions = False
        self._deferred: DeferredLog | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._written: list[tuple[dict[str, Any], str]] = []
        self._reread: list[tuple[dict[str, Any], str]] = []
        for name, tensor in tensors.items():
            self._register(name, tensor, name in buffers, name in persistent)

    def _register(self, name: str, tensor: Tensor, is_buffer: bool, persistent: bool) -> None:
        owner, leaf = self._owner(name)
        if isinstance(tensor, nn.Parameter) and not is_buffer:  # a model may register a parameter as a buffer too
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor, persistent=persistent)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, leaf

    def bind(
        self,
        compile_with: Callable[[str, DeferredLog | None], Callable[..., Any]],
        states: Sequence[str],
        *,
        written: Sequence[str],
        reread: Sequence[str],
        draws: bool,
        has_regions: bool,
        device: str,
        synced_channels: tuple[int, ...],
    ) -> None:
        """Set what a call runs. Called once, by `make_stage_module`; then `use_backend` says how.

        `compile_with(backend, log)` returns a function of (*inputs, *states, seed base). `written` are the states that
        it writes, `reread` those of them whose values it computes with.
        """
        object.__setattr__(self, "_compile_with", compile_with)
        self._draws, self._has_regions, self._device = draws, has_regions, device
        object.__setattr__(self, "synced_channels", synced_channels)
        self._slots = [self._slot(name) for name in states]
        self._written = [self._slot(name) for name in written]
        self._reread = [self._slot(name) for name in reread]

    def _slot(self, name: str) -> tuple[dict[str, Any], str]:
        owner, leaf = self._owner(name)
        return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf

    def written_states(self) -> list[Tensor]:
        """Return the parameters, buffers and constants that a forward writes."""
        return [held[name] for held, name in self._written]

    def reread_states(self) -> list[Tensor]:
        """Return those of `written_states` whose values change what a forward computes."""
        return [held[name] for held, name in self._reread]

    def use_backend(self, backend: str) -> None:
        """Run through `backend` from now on, with the same tensors: "eager" or a backend of torch.compile."""
        log = self._deferred if backend == "eager" else None
        run = self._compile_with(backend, log)
        object.__setattr__(self, "_run", run)  # no submodule: the stage's modules are the model's
        self._backend, self._takes_tensor_seed = backend, backend != "eager"
        self.set_seed_base(0)

    def defer_weights(self) -> None:
        """Note from now on, in forwards that run eagerly, which weights' gradients can wait; see `take_deferred`."""
        self._deferred = DeferredLog()
        self.use_backend(self._backend)

    def take_deferred(self) -> list[Deferred]:
        """Return those of the last forward, in the order of their operations; none where the stage is compiled."""
        return self._deferred.take() if self._deferred is not None else []

    def backend_problem(self, backend: str) -> str | None:
        """Return what this machine lacks to compile the stage with `backend`, None if nothing."""
        return compile_problem("inductor" if backend == AUTO else backend, self._device)

    @property
    def draws(self) -> bool:
        """Whether a forward draws, and so needs a seed base."""
        return self._draws

    def set_seed_base(self, base: int) -> None:
        """Set what the random operations of the next forward draw from, together with their number in the capture."""
        if self._draws:
            self._seed_base = (torch.tensor(base),) if self._takes_tensor_seed else (base,)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the stage's outputs; inputs are never mutated, and no output aliases one."""
        states = [held[name] for held, name in self._slots]
        try:
            if not self._has_regions:
                return self._run(*inputs, *states, *self._seed_base)
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # an exception inside a no_grad region leaves it
                return self._run(*inputs, *states, *self._seed_base)
        except Exception as error:
            note_line(error)
            raise


def make_stage_module(
    cut: Cut,
    stage: StageGraph,
    *,
    device: str | torch.device,
    compile: str,
    dtype: torch.dtype | None,
    tensors: nn.Module | None = None,
) -> StageModule:
    """Return stage `stage` with real values on `device`, or `tensors`' own, its buckets compiled with `compile`."""
    captured, spec = cut.captured, cut.spec.stages[stage.index]
    if torch.device(device).type != captured.device and torch.device(device).type != "meta":
        raise UserError(
            f"the model was captured for {captured.device}; capture it with device={str(device)!r} to run there"
        )
    held = _materialise(cut, stage, device, dtype) if tensors is None else _shared(cut, stage, tensors)
    constants = {s.name for s in stage.states if s.kind == "constant"}
    buffers = frozenset(name for name, _ in captured.module.named_buffers(remove_duplicate=False))
    module = StageModule(spec, held, buffers, captured.persistent - constants)
    names = [state.name for state in stage.states]
    module.bind(
        lambda backend, log: _runner(cut, stage, backend, log),
        names,
        written=written_states(stage),
        reread=reread_states(stage),
        draws=stage.draws,
        has_regions=stage.has_regions,
        device=captured.device,
        synced_channels=_synced_channels(stage),
    )
    module.use_backend(compile)
    return module


def _synced_channels(stage: StageGraph) -> tuple[int, ...]:
    """Return how many channels each call of SyncedBatchNorm normalises."""
    calls = [
        node for node in stage.graph.nodes if (traits := traits_of(node.target)) and traits.function is SyncedBatchNorm
    ]
    return tuple(int(node.all_input_nodes[0].meta["val"].shape[1]) for node in calls)


def _materialise(
    cut: Cut, stage: StageGraph, device: str | torch.device, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the stage's parameters and buffers by every name they have, tied names sharing one tensor."""
    captured, spec = cut.captured, cut.spec.stages[stage.index]
    constants = [s.name for s in stage.states if s.kind == "constant"]
    names = [*(p.name for p in spec.parameters), *spec.buffers]
    from_source = [*names, *(name for name in constants if name not in captured.lifted)]
    values = captured.source.take(from_source)
    values |= {name: captured.lifted[name].detach().clone() for name in constants if name in captured.lifted}
    tensors: dict[str, Tensor] = {}
    requires_grad = {p.name: p.requires_grad for p in spec.parameters}
    for name, value in values.items():
        value = value.detach().to(device)
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        tensors[name] = nn.Parameter(value, requires_grad[name]) if name in requires_grad else value
    for alias, canonical in cut.spec.aliases:
        if canonical in tensors:
            tensors[alias] = tensors[canonical]
    return tensors


def _shared(cut: Cut, stage: StageGraph, module: nn.Module) -> dict[str, Tensor]:
    """Return the stage's parameters and buffers out of `module`, a stage of another cut, and constants of its own."""
    known = dict(named_tensors(module))
    names = {s.name for s in stage.states if s.kind != "constant"}
    missing = sorted(names - known.keys())
    if missing:
        raise UserError(f"stage {stage.index} needs {missing[0]}, which the given module does not hold; use cut_like")
    device = next((tensor.device for tensor in known.values()), torch.device(cut.captured.device))
    tensors = {name: known[name] for name in names}
    constants = [s.name for s in stage.states if s.kind == "constant"]
    made = cut.captured.source.take([name for name in constants if name not in cut.captured.lifted])
    made |= {name: cut.captured.lifted[name] for name in constants if name in cut.captured.lifted}
    return tensors | {name: value.detach().clone().to(device) for name, value in made.items()}


def _runner(cut: Cut, stage: StageGraph, backend: str, log: DeferredLog | None) -> Callable[..., Any]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    if log is not None:
        mark(graph, _trained_alone(cut, stage))
    fakes = stage_fakes(cut.captured, stage, cut.edge_fakes)
    examples = [fakes[node.name] for node in stage.graph.nodes if node.op == "placeholder"]
    eager: set[fx.Node] = set()
    if backend != "eager":
        eager = {node for node in graph.nodes if traits_of(node.target) is not None}
        if stage.draws:
            seed = next(node for node in graph.nodes if node.name == "seed_base")
            eager |= functional_dropout(graph, seed)
            examples[-1] = cut.captured.mode.from_tensor(torch.tensor(0), static_shapes=True)
    gm = fx.GraphModule(nn.Module(), graph)
    rule = cut.buckets or BucketRule(1 << 62)
    result = split(
        gm,
        examples,
        cap_bytes=rule.cap_bytes,
        first_cap_bytes=rule.first_cap_bytes,
        compile_fn=_compile_fn(backend, log),
        runs_eagerly=eager.__contains__ if eager else None,
    )
    return result.module


def _trained_alone(cut: Cut, stage: StageGraph) -> set[str]:
    """Return the placeholders of parameters that train and that no other placeholder of the stage stands for."""
    placeholders = [node.name for node in stage.graph.nodes if node.op == "placeholder"][len(stage.inputs) :]
    canonical = dict(cut.spec.aliases)
    names = [canonical.get(state.name, state.name) for state in stage.states]
    trained = {p.name for p in cut.spec.stages[stage.index].parameters if p.requires_grad}
    pairs = zip(placeholders, names, strict=False)  # the seed base may follow the states
    return {placeholder for placeholder, name in pairs if name in trained and names.count(name) == 1}


def _compile_fn(backend: str, log: DeferredLog | None) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    if backend == "eager":
        return lambda bucket, examples: bucket if log is None else with_notes(bucket, log)
    check_backend(backend)
    # The function, not the module: that costs three calls more per chunk.
    return lambda bucket, examples: torch.compile(bucket.forward, backend=backend, dynamic=_is_dynamic(examples))


def _is_dynamic(examples: list[Any]) -> bool | None:
    """Return None where sizes differ between chunks: compiled for the first size, which is faster code (a convnet by 6 %),
    and once more for all others when a second one comes. False where no size can differ.
    """
    sizes = [size for t in examples if isinstance(t, Tensor) for size in t.size()]
    return None if any(isinstance(value, torch.SymInt) for value in (*sizes, *examples)) else False
