"""Cut a capture into stages: `cut` chooses the positions, names what each stage owns and writes the ModelSpec.

Policies: `Balanced` (measured costs, exact partition), "parameters", "layers", "bucket:25MiB", module paths, or the cut of
a published plan. What is legal comes from graph.cut.layout, the partition from plan.partition, the graphs from graph.cut.stages. Called
through `Captured.cut`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from stagekit.errors import SplitError
from stagekit.graph.bucket import group_nodes, legal_begins
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.buckets.spans import written_spans
from stagekit.graph.compile.module import StageModule, make_stage_module
from stagekit.graph.cut.choose import Choice, choose
from stagekit.graph.cut.costs import Cost, trained_weight_of
from stagekit.graph.cut.layout import Layout, lay_out
from stagekit.graph.cut.stages import Chain, StageGraph, build_chain
from stagekit.graph.cut.verify import verify_chain
from stagekit.plan.contract import Bucket, ModelSpec, ParameterSpec, StageSpec
from stagekit.plan.split import Balanced, Usage

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured


@dataclass(frozen=True)
class Cut:
    """A capture cut into stages. `spec` says everything about it; `stage_module` makes a stage to run."""

    captured: Captured
    spec: ModelSpec
    buckets: BucketRule | None
    graphs: tuple[StageGraph, ...] = field(repr=False)
    edge_fakes: Mapping[str, Any] = field(repr=False)

    def stage_module(
        self,
        index: int,
        *,
        device: str | torch.device = "cpu",
        compile: str = "eager",
        dtype: torch.dtype | None = None,
        tensors: nn.Module | None = None,
    ) -> StageModule:
        """Return stage `index` on `device`, holding only its own parameters and buffers, under their original names.

        `compile`: "eager", or any torch.compile backend, applied to each bucket; `StageModule.use_backend` changes
        it. `dtype` casts floating values.
        `tensors`: a stage whose parameters and buffers this one shares instead of making its own (`Captured.cut_like`).
        """
        if not 0 <= index < len(self.graphs):
            raise SplitError(f"there is no stage {index}; the model was cut into {len(self.graphs)}")
        return make_stage_module(self, self.graphs[index], device=device, compile=compile, dtype=dtype, tensors=tensors)


def cut(
    captured: Captured,
    split: str | Sequence[str] | Balanced,
    stages: int,
    *,
    buckets: BucketRule | None,
    at_nodes: Sequence[str] | None,
    measured: bool = True,
    usage: Usage | None = None,
    choice: Choice | None = None,
) -> Cut:
    """Return `captured` cut into `stages` stages; see `Captured.cut`. `choice`: where it is made already."""
    layout = lay_out(captured)
    with torch.random.fork_rng(devices=[]):
        if choice is None:
            choice = choose(captured, layout, split, stages, at_nodes, measured=measured, usage=usage)
        stage_of = {node: _stage_at(choice.begins, i) for i, node in enumerate(layout.nodes) if node in layout.work}
        chain = build_chain(captured, layout, stage_of, stages)
        verify_chain(captured, layout, stage_of, chain)
    owned = _owned(captured, chain)
    reached = {captured.origins[node.name].name for node in captured.graph.nodes if _is_reached(node)}
    specs = tuple(_stage_spec(captured, layout, choice, chain, i, owned[i], reached, buckets) for i in range(stages))
    spec = ModelSpec(
        inputs=captured.inputs,
        symbols=captured.symbols.symbols,
        stages=specs,
        edges=chain.edges,
        outputs=chain.outputs,
        aliases=captured.aliases,
        graph_hash=captured.graph_hash,
        self_check=captured.self_check,
        split_report=choice.report,
        guards=captured.guards,
        fixed=captured.fixed,
        start_values=captured.source.note,
    )
    return Cut(captured, spec, buckets, chain.stages, chain.edge_fakes)


def _stage_at(begins: Sequence[int], position: int) -> int:
    return sum(position >= begin for begin in begins[1:])


def _owned(captured: Captured, chain: Chain) -> list[list[str]]:
    """Return the canonical parameter and buffer names per stage; unused ones go to their nearest relatives.

    Between stages equally near, one goes where the name registered before it is: what only eval mode reads usually stands
    in the constructor where it stands in forward.
    """
    canonical = dict(captured.aliases)
    names = [name for name in captured.tensors if name not in canonical and _is_state(captured, name)]
    used = [{s.name for s in stage.states if s.kind != "constant"} for stage in chain.stages]
    owned: list[list[str]] = [[] for _ in chain.stages]
    latest = 0
    for name in names:
        readers = [i for i, held in enumerate(used) if name in held] or [_nearest(name, used, latest)]
        for index in readers:
            owned[index].append(name)
        latest = readers[-1]
    return owned


def _is_state(captured: Captured, name: str) -> bool:
    return isinstance(captured.tensors[name], nn.Parameter) or name in captured.buffers


def _nearest(name: str, used: Sequence[set[str]], latest: int) -> int:
    """Return the stage that uses the name with the longest common module path, `latest` if that is one of them."""

    def common(other: str) -> int:
        count = 0
        for a, b in zip(name.split("."), other.split("."), strict=False):
            if a != b:
                break
            count += 1
        return count

    best = [max((common(other) for other in held), default=0) for held in used]
    return latest if best[latest] == max(best) else best.index(max(best))


def _stage_spec(
    captured: Captured,
    layout: Layout,
    choice: Choice,
    chain: Chain,
    index: int,
    owned: list[str],
    reached: Set[str],
    rule: BucketRule | None,
) -> StageSpec:
    stage = chain.stages[index]
    parameters = tuple(
        ParameterSpec(
            name,
            tuple(t.shape),
            str(t.dtype).removeprefix("torch."),
            t.requires_grad,
            t.numel() * t.element_size(),
            name in reached,
        )
        for name in owned
        if isinstance(t := captured.tensors[name], nn.Parameter)
    )
    ends = [*choice.begins[1:], len(layout.nodes)]
    nodes = [n for n in layout.nodes[choice.begins[index] : ends[index]] if n in layout.work]
    costs = [choice.costs[n.name] for n in nodes if n.name in choice.costs]
    halves = [_halves(captured, choice.costs[n.name], n, nodes) for n in nodes if n.name in choice.costs]
    return StageSpec(
        index=index,
        begins_at=_module_path(nodes[0]) if nodes else "",
        first_node=nodes[0].name if nodes else "",
        inputs=stage.inputs,
        outputs=stage.outputs,
        parameters=parameters,
        buffers=tuple(name for name in owned if not isinstance(captured.tensors[name], nn.Parameter)),
        buckets=_bucket_specs(stage, parameters, rule),
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs),
        input_grad_s=sum(early for early, _ in halves),
        weight_grad_s=sum(late for _, late in halves),
        draws=stage.draws,
    )


def _halves(captured: Captured, cost: Cost, node: fx.Node, stage: Sequence[fx.Node]) -> tuple[float, float]:
    """Return what an operation takes in the two halves of its stage's backward."""
    weight = trained_weight_of(captured, node)
    if cost.halves is None or weight is None or any(user is not node and user in stage for user in weight.users):
        return cost.backward_s, 0.0
    return cost.halves


def _is_reached(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta["reached"])


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).partition("@")[0] if stack else ""


def _bucket_specs(
    stage: StageGraph, parameters: Sequence[ParameterSpec], rule: BucketRule | None
) -> tuple[Bucket, ...]:
    """Return the buckets of a stage, last layers first; parameters without a gradient are in none."""
    sizes = {p.name: p.size_bytes for p in parameters if p.requires_grad and p.is_reached}
    if not sizes:
        return ()
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"][len(stage.inputs) :]
    weights = {
        node: {state.name: sizes[state.name]}
        for node, state in zip(placeholders, stage.states, strict=False)
        if state.kind == "parameter" and state.name in sizes
    }
    written = written_spans(fx.GraphModule(nn.Module(), stage.graph), ())
    groups = group_nodes(stage.graph, weights, rule or BucketRule(1 << 62), legal=legal_begins(stage.graph, written))
    return tuple(Bucket(group.size_bytes, group.parameters) for group in reversed(groups) if group.parameters)
