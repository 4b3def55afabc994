"""Capture a model as one flat graph: `capture` exports it on fake tensors, checks it, and returns a `Captured`.

Decides what the graph's inputs, outputs, parameters and tied names are. Leaves the export to graph.capture.export, the
self-check to graph.capture.selfcheck, passes to graph.passes.normalise and graph.passes.aliasing, cutting to graph.cut. Called by
stagekit.api, stagekit.describe and workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from stagekit.errors import BugError, CaptureError, ShapeError
from stagekit.graph.capture.caches import caches_stay_real
from stagekit.graph.capture.export import Exported, export_model
from stagekit.graph.capture.fingerprint import attribute_values, graph_hash
from stagekit.graph.capture.limits import table_limits
from stagekit.graph.capture.lists import list_conditions
from stagekit.graph.capture.precision import FP32
from stagekit.graph.capture.refusals import unwrapped
from stagekit.graph.capture.selfcheck import self_check
from stagekit.graph.capture.sharing import check_sharing, written_names
from stagekit.graph.capture.specs import Leaf, Spec, batch_dims, flatten_named
from stagekit.graph.capture.symbols import SymbolTable, symbol_table
from stagekit.graph.passes.aliasing import functionalise
from stagekit.graph.passes.buffers import clone_written_inputs, snapshot_buffers, write_back_early
from stagekit.graph.passes.layouts import layout_conditions
from stagekit.graph.passes.normalise import drop_dead_code, normalise
from stagekit.graph.passes.propagate import line_of, propagate
from stagekit.graph.values.build import Start, ValueSource, named_tensors, open_model
from stagekit.plan.contract import FixedSize, GraphInput
from stagekit.synced import recordable

if TYPE_CHECKING:
    from stagekit.graph.buckets.rule import BucketRule
    from stagekit.graph.cut.choose import Choice
    from stagekit.graph.cut.cut import Cut
    from stagekit.plan.split import Balanced, Usage

_PREFIXES = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a placeholder of the flat graph stands for; `index` is the number of a graph input."""

    kind: str  # "parameter", "buffer", "constant" or "input"
    name: str
    index: int = -1
    persistent: bool = True
    requires_grad: bool = False


@dataclass(frozen=True)
class Captured:
    """A model captured once; cut it as often as you like.

    `graph` is flat: parameters, buffers, constants and inputs are placeholders, told apart by `origins`.
    """

    graph: fx.Graph
    origins: Mapping[str, Origin]  # by placeholder name
    storages: Mapping[str, int]  # node name → number of the memory it lives in
    inputs: tuple[GraphInput, ...]
    symbols: SymbolTable
    guards: tuple[str, ...]  # conditions over the symbols' names: the model's branches on sizes, numbers of pieces
    fixed: tuple[FixedSize, ...]  # why sizes that one would expect to differ between chunks are the example's
    aliases: tuple[tuple[str, str], ...]
    tensors: Mapping[str, Tensor]  # fake parameters and buffers by name, also those that the graph does not use
    buffers: frozenset[str]
    persistent: frozenset[str]  # parameters and buffers that belong into a state_dict
    source: ValueSource
    lifted: Mapping[str, Tensor]  # constants that export made
    in_tree: Any
    out_tree: Any
    mode: FakeTensorMode
    device: str
    training: bool | None  # the mode that was asked for; None: each submodule's own flag
    graph_hash: str
    self_check: str
    module: nn.Module = field(repr=False)  # the captured module; large values are fake if it came from a constructor
    again: Callable[..., Captured] | None = field(default=None, repr=False)  # captures the same model in another mode
    precision: str = FP32  # under which forward was captured

    def in_eval_mode(self) -> Captured:
        """Capture the same model in eval mode. Raises CaptureError."""
        if self.again is None:
            raise BugError("this capture does not know how it was made")
        return self.again(training=False)

    def without_gradients(self) -> Captured:
        """Return this capture for forwards alone: nothing in its graph asks for a gradient, so that what is measured,
        held and sent counts none.
        """
        for node in self.graph.nodes:
            if "requires_grad" in node.meta:
                node.meta["requires_grad"] = False
        return self

    def cut(
        self,
        split: str | Sequence[str] | Balanced,
        stages: int,
        *,
        buckets: BucketRule | None = None,
        at_nodes: Sequence[str] | None = None,
        measured: bool = True,
        usage: Usage | None = None,
        choice: Choice | None = None,
    ) -> Cut:
        """Cut into `stages` stages; `at_nodes` repeats the cut of a published plan without measuring anything.

        Each node is timed, for the plan's predictions also where the policy needs no costs; `measured=False` skips it.

        `split`: "balanced" or `Balanced(...)`, "parameters", "layers", "bucket:25MiB", or the module paths where stages
        1, 2, … begin. `usage` says how the stages will run, for a memory cap. `choice`: it is made already. Raises
        SplitError.
        """
        from stagekit.graph.cut.cut import cut

        return cut(
            self, split, stages, buckets=buckets, at_nodes=at_nodes, measured=measured, usage=usage, choice=choice
        )

    def cut_like(self, cut: Cut) -> Cut:
        """Cut this capture, of the same model in eval mode, so that each stage reads only what `cut`'s stage owns.

        `Cut.stage_module(i, tensors=stage_i_of_the_other_cut)` then makes a stage on that stage's own tensors.
        Raises SplitError naming a parameter or buffer that no such cut reaches.
        """
        from stagekit.graph.cut.evaluation import cut_like

        return cut_like(self, cut)

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the leaves of (args, kwargs) in the order of `inputs`; None stands for a tensor that is not here.

        Raises ShapeError if the structure or a burned-in constant differs from the example's.
        """
        try:  # compares keys as a set, so that keywords and dicts may come in any order
            values = self.in_tree.flatten_up_to((tuple(args), dict(kwargs or {})))
        except ValueError:
            leaves, _ = flatten_named(args, kwargs or {})
            raise ShapeError(
                f"the arguments are built like {[leaf.name for leaf in leaves]}, the captured example like "
                f"{[given.name for given in self.inputs]}; pass the same structure"
            ) from None
        for value, expected in zip(values, self.inputs, strict=True):
            if expected.tensor is not None and value is None:
                continue  # another rank passes it
            if (expected.tensor is None) != (not isinstance(value, Tensor)):
                raise ShapeError(f"{expected.name} is a {type(value).__name__}; the captured example differs there")
            if expected.tensor is None and value != expected.constant:
                raise ShapeError(
                    f"{expected.name} is {value!r}, but {expected.constant!r} was burned in at capture; "
                    "capture again, or pass it as a tensor"
                )
        return list(values)

    def unflatten_output(self, leaves: Sequence[Any]) -> Any:
        """Rebuild what the model returns from its leaves: dicts, dataclasses, tuples."""
        if len(leaves) != self.out_tree.num_leaves:
            raise ShapeError(f"the model returns {self.out_tree.num_leaves} leaves, got {len(leaves)}")
        return pytree.tree_unflatten(list(leaves), self.out_tree)


def capture(
    model: nn.Module | Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    training: bool | None = None,
    args_spec: Sequence[Spec | None] | Mapping[int, Spec] | None = None,
    kwargs_spec: Mapping[str, Spec] | None = None,
    check: bool = True,
    start: Start | None = None,
    precision: str = FP32,
) -> Captured:
    """Return `model` captured for `device` from example inputs of ONE chunk.

    A callable builds the model under the init recorder, as if after torch.manual_seed(seed). What the mode decides
    (dropout, BatchNorm, other outputs) is burned in: `training` True or False captures after train() or eval(), None as
    each submodule's flag says, so that a BatchNorm frozen in eval mode inside a training model stays frozen.
    `start` says otherwise where the values come from. `precision`: a name of graph.capture.precision, "bf16" captures as
    if forward ran under that autocast.
    `check=False` skips the self-check: workers do, the plan was checked. Module, inputs and generators are left as they
    were.
    Raises CaptureError or ShapeError.
    """
    device_type = _supported(device)
    model = unwrapped(model)
    leaves, in_tree = flatten_named(args, kwargs or {}, args_spec, kwargs_spec)
    _check_examples(leaves)
    split_dims = batch_dims(leaves)
    generators = torch.random.fork_rng(
        _generators(device_type), device_type=device_type if device_type != "cpu" else "cuda"
    )
    with generators, recordable():
        module, source = open_model(model, seed, start)
        with caches_stay_real(module):
            exported = export_model(module, leaves, in_tree, split_dims, device_type, training, precision)
            captured = _captured(exported, module, source, leaves, split_dims, in_tree, device_type, training)
            captured = dataclasses.replace(captured, precision=precision)
        if not check:
            return captured
        try:
            with caches_stay_real(module):
                verdict = self_check(captured, model, leaves, seed)
        except CaptureError as error:
            if not exported.compiled_branch:
                raise
            raise CaptureError(
                f"{error}; forward asks {exported.compiled_branch}, and a capture hears yes: let it compute the same either way"
            ) from error
        symbols = captured.symbols.with_minimum(verdict.minimum)
        return dataclasses.replace(captured, self_check=verdict.kind, symbols=symbols)


def _generators(device_type: str) -> list[int]:
    """Return the devices whose generators a check may move."""
    present = device_type != "cpu" and torch.get_device_module(device_type).is_available()
    return list(range(torch.get_device_module(device_type).device_count())) if present else []


def _supported(device: str) -> str:
    device_type = torch.device(device).type
    if device_type == "cuda" and not torch.backends.cuda.is_built():
        raise CaptureError("this PyTorch is built without CUDA and can't capture for it; install a CUDA build here")
    return device_type


def _check_examples(leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if isinstance(leaf.value, Tensor) and leaf.value.is_meta:
            raise CaptureError(
                f"{leaf.name} is on the meta device, where it has no values to check the capture with; pass one chunk of "
                f"real data on the CPU: torch.zeros({tuple(leaf.value.shape)}, dtype={leaf.value.dtype}) if zeros are legal"
            )


def _captured(
    model: Exported,
    module: nn.Module,
    source: ValueSource,
    leaves: list[Leaf],
    split_dims: list[int | None],
    in_tree: Any,
    device: str,
    training: bool | None,
) -> Captured:
    exported, mode, skeleton = model.program, model.mode, model.skeleton
    aliases = tied_names(skeleton)
    origins, renamed = _origins(exported, dict(aliases), skeleton)
    graph, new_names = normalise(exported.graph_module, renamed, model.calls)
    origins = {new_names[name]: origin for name, origin in origins.items()}
    fakes = {n.name: _placeholder_value(n, origins[n.name], leaves) for n in graph.nodes if n.op == "placeholder"}
    by_index = {origins[name].index: fake for name, fake in fakes.items() if origins[name].kind == "input"}
    in_order = [by_index.get(i) for i in range(len(leaves))]
    _check_constants({k: v for k, v in exported.constants.items() if k not in dict(named_tensors(skeleton))})
    table = symbol_table(in_order, [leaf.value for leaf in leaves], split_dims, exported.range_constraints)
    _check_symbols(graph, table)
    table = table.with_maximum(table_limits(graph, table))
    storages, layouts = _settle(graph, origins, fakes, mode)
    held = {name: origin.name for name, origin in origins.items() if origin.kind != "input"}
    check_sharing(module, held.values(), written_names(graph, storages, held))
    inputs = tuple(
        GraphInput(leaf.name, table.spec(fake), split_dim)
        if isinstance(leaf.value, Tensor) and fake is not None
        else GraphInput(leaf.name, None, None, leaf.value)
        for leaf, fake, split_dim in zip(leaves, in_order, split_dims, strict=True)
    )
    out_tree = exported.call_spec.out_spec
    begun = {name for name, _ in named_tensors(module)}  # the copy also holds what its forward made
    tensors = {name: tensor for name, tensor in named_tensors(skeleton) if name in begun}
    lifted = {k: v for k, v in exported.constants.items() if isinstance(v, Tensor) and k not in tensors}
    return Captured(
        graph=graph,
        origins=origins,
        storages=storages,
        inputs=inputs,
        symbols=table,
        guards=table.guards([*model.guards, *list_conditions(graph), *layouts]),
        fixed=model.fixed,
        aliases=aliases,
        tensors=tensors,
        buffers=frozenset(name for name, _ in skeleton.named_buffers(remove_duplicate=False)),
        persistent=frozenset(skeleton.state_dict(keep_vars=True)),
        source=source,
        lifted=lifted,
        in_tree=in_tree,
        out_tree=out_tree,
        mode=mode,
        device=device,
        training=training,
        graph_hash=graph_hash(
            graph,
            (inputs, table.symbols, device, training, aliases, str(out_tree)),
            {**tensors, **attribute_values(module), **lifted},
            [type(child).__module__ for child in module.modules()],
        ),
        self_check="none (not asked for)",
        module=module,
    )


def _placeholder_value(node: fx.Node, origin: Origin, leaves: list[Leaf]) -> Any:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return leaves[origin.index].value if origin.kind == "input" else value
    wants = leaves[origin.index].value.requires_grad if origin.kind == "input" else origin.requires_grad
    return value.detach().requires_grad_(wants)


def _settle(
    graph: fx.Graph, origins: Mapping[str, Origin], fakes: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[dict[str, int], list[sympy.Basic]]:
    """Run the alias passes until nothing changes; return the storage numbers of the final graph, and for which sizes
    memory is shared as these passes saw it.
    """
    inputs = {name for name, origin in origins.items() if origin.kind == "input"}
    conditions: list[sympy.Basic] | None = None
    while True:
        storages = propagate(graph, fakes, mode)
        kept = frozenset(storages[name] for name in origins if name in storages and name not in inputs)
        if conditions is None:
            conditions = layout_conditions(graph, storages, kept)
        changed = functionalise(graph, storages, kept)
        changed = (
            changed
            or write_back_early(graph, storages)
            or clone_written_inputs(graph, storages, inputs)
            or snapshot_buffers(graph, storages, set(fakes) - inputs)
        )
        if not changed:
            return storages, conditions
        drop_dead_code(graph)


def tied_names(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return (alias, canonical) for each parameter or buffer with several names; the first name is canonical."""
    first: dict[int, str] = {}
    aliases = []
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases.append((name, canonical))
    return tuple(aliases)


def _origins(
    exported: torch.export.ExportedProgram, canonical_of: Mapping[str, str], skeleton: nn.Module
) -> tuple[dict[str, Origin], dict[str, str]]:
    """Return what each placeholder stands for, and which placeholder replaces that of a tied name."""
    origins: dict[str, Origin] = {}
    by_target: dict[str, str] = {}
    renamed: dict[str, str] = {}
    grads = {name: p.requires_grad for name, p in skeleton.named_parameters(remove_duplicate=False)}
    persistent = skeleton.state_dict(keep_vars=True)
    num_inputs = 0
    for spec in exported.graph_signature.input_specs:
        kind = _PREFIXES.get(spec.kind)
        if kind is None:
            raise CaptureError(f"the model holds {spec.target or spec.arg.name} ({spec.kind.name}), which can't be cut")
        target = spec.target or spec.arg.name
        if kind == "input":
            origins[spec.arg.name] = Origin("input", target, num_inputs)
            num_inputs += 1
            continue
        by_target[target] = spec.arg.name
        origins[spec.arg.name] = Origin(
            kind,
            canonical_of.get(target, target),
            persistent=target in persistent,
            requires_grad=grads.get(target, False),
        )
    for alias, name in canonical_of.items():
        if alias in by_target and name in by_target:
            renamed[by_target[alias]] = by_target[name]
    return origins, renamed


def _check_symbols(graph: fx.Graph, table: SymbolTable) -> None:
    """Refuse sizes and numbers that depend on values, by the line that makes the first one."""
    for node in graph.nodes:
        if "functorch" in str(getattr(node.target, "__module__", "")):
            raise CaptureError(f"torch.vmap or torch.func{line_of(node)} can't be captured; write the batch out")
        for value in pytree.tree_leaves(node.meta.get("val")):
            numbers = tuple[Any, ...](value.size()) if isinstance(value, Tensor) else (value,)
            for number in numbers:
                if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
                    table.check_known(number.node.expr, line_of(node))


def _check_constants(lifted: Mapping[str, Any]) -> None:
    for name, value in lifted.items():
        if isinstance(value, FakeTensor):
            raise CaptureError(
                f"forward uses a tensor ({name}, shape {tuple(value.shape)}) that it computed where the capture does not "
                "see it; compute it with torch functions in forward, or register it as a buffer"
            )
