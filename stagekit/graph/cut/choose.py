"""Choose where stages begin: the policies of `split`, and the words for a choice that can't be met. Called by graph.cut."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import fx

from stagekit.errors import SplitError
from stagekit.graph.bucket import group_nodes
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.cut.costs import Cost, node_costs, tensor_bytes
from stagekit.graph.cut.footprint import cut_within, footprint
from stagekit.graph.cut.layout import Layout, held_together
from stagekit.plan.memory import Memory, in_units
from stagekit.plan.partition import Partition, partition
from stagekit.plan.schedules.registry import ranks_for
from stagekit.plan.split import Balanced, Usage, check_split, parse_split

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured


@dataclass(frozen=True)
class Choice:
    """Positions in `Layout.nodes` where stages begin (the first is 0), and how they were found."""

    begins: tuple[int, ...]
    report: str
    costs: Mapping[str, Cost] = field(default_factory=dict)


def choose(
    captured: Captured,
    layout: Layout,
    split: str | Sequence[str] | Balanced,
    stages: int,
    at_nodes: Sequence[str] | None,
    *,
    measured: bool = True,
    usage: Usage | None = None,
) -> Choice:
    """Return where the stages begin, and what each node costs if `measured`. Raises SplitError with the numbers or the
    nearest names. The cut of a published plan is not measured again.
    """
    if at_nodes is not None:
        return _at_nodes(layout, at_nodes, stages)
    try:
        choice = _chosen(captured, layout, split, stages, usage or Usage())
    except SplitError as error:
        why = held_together(captured) if stages - 1 > len(layout.legal) else ""
        if not why:
            raise
        raise SplitError(f"{error}; {why}") from error
    if measured and not choice.costs:
        choice = replace(choice, costs=node_costs(captured, layout, "measured"))
    if isinstance(split, Balanced) and split.speeds:
        ranks = (usage or Usage()).ranks(stages)
        choice = replace(choice, costs=at_speeds(layout, choice, [split.speeds[rank] for rank in ranks]))
    return choice


def at_speeds(layout: Layout, choice: Choice, speeds: Sequence[float]) -> dict[str, Cost]:
    """Return what nodes cost on the ranks that run them, for the plan's predictions; `speeds` are per stage."""
    costs = {}
    for i, node in enumerate(layout.nodes):
        if node.name in choice.costs:
            cost, speed = choice.costs[node.name], speeds[bisect_right(choice.begins, i) - 1]
            costs[node.name] = cost.at_speed(speed)
    return costs


def _chosen(
    captured: Captured, layout: Layout, split: str | Sequence[str] | Balanced, stages: int, usage: Usage
) -> Choice:
    check_split(split, stages, usage.stages_per_rank)
    if not isinstance(split, str | Balanced):
        return _at_paths(layout, split)
    match parse_split(split) if isinstance(split, str) else split:
        case Balanced() as wish:
            return _balanced(captured, layout, wish, stages, usage)
        case int(cap_bytes):
            return _by_buckets(captured, layout, cap_bytes, stages)
        case "parameters":
            return _by_parameters(captured, layout, stages)
        case _:
            return _by_layers(layout, stages)


def _balanced(captured: Captured, layout: Layout, wish: Balanced, stages: int, usage: Usage) -> Choice:
    costs = node_costs(captured, layout, wish.costs)
    seconds = [0.0] * len(layout.nodes)
    for i, node in enumerate(layout.nodes):
        if node.name in costs:
            cost = costs[node.name]
            seconds[i] = cost.forward_s * (2 if usage.recompute else 1) + cost.backward_s
    legal = block_begins(layout, stages) if wish.block_boundaries else layout.legal
    speeds = wish.speeds or (1.0,) * ranks_for(stages, usage.stages_per_rank)

    crossing, ranks = layout.crossing_s(captured), usage.ranks(stages)
    if wish.costs != "measured":
        crossing = _as_tie_breaks(crossing, sum(seconds) / stages)

    def solve(memory: Memory | None) -> Partition:
        return partition(seconds, crossing, legal, stages, speeds=speeds, ranks=ranks, memory=memory)

    report = f"balanced on {'measured costs' if wish.costs == 'measured' else wish.costs}"
    report += ", at blocks" if wish.block_boundaries else ""
    report += f", speeds {', '.join(f'{speed:g}' for speed in wish.speeds)}" if wish.speeds else ""
    if wish.memory_bytes is None:
        found = solve(None)
    else:
        footing = footprint(captured, layout, optimizer_state=wish.optimizer_state, recompute=usage.recompute)
        cap = wish.memory_bytes / usage.most_per_rank
        found, needs = cut_within(solve, footing, cap, usage.in_flight(stages))
        report += f", largest stage {in_units(needs)} of {in_units(cap)}"
    noun = "stage" if usage.most_per_rank == 1 else "rank"
    return Choice(found.begins, f"{report}: {_gap(found, 1e3, 'ms', noun)}", costs if wish.costs == "measured" else {})


def _as_tie_breaks(crossing: Sequence[float], mean_stage_s: float) -> list[float]:
    """Scale transfers down to 1 % of a mean stage. Counted costs know nothing of the overhead of each operation, so that in
    a small model the latency of a link would outweigh them all.
    """
    largest = max(crossing, default=0.0)
    factor = min(1.0, 0.01 * mean_stage_s / largest) if largest else 1.0
    return [factor * each for each in crossing]


def _by_parameters(captured: Captured, layout: Layout, stages: int) -> Choice:
    counted: set[fx.Node] = set()
    sizes = [0.0] * len(layout.nodes)
    for i, node in enumerate(layout.nodes):
        for operand in node.all_input_nodes:
            origin = captured.origins.get(operand.name) if operand.op == "placeholder" else None
            if origin is not None and origin.kind == "parameter" and operand not in counted:
                counted.add(operand)
                sizes[i] += tensor_bytes(captured, operand.meta["val"])
    found = partition(sizes, [0.0] * len(sizes), layout.legal, stages)
    return Choice(found.begins, f"balanced on parameter bytes: {_gap(found, 2**-20, 'MiB', 'stage')}")


def _gap(found: Partition, factor: float, unit: str, noun: str) -> str:
    return (
        f"largest {noun} {found.slowest * factor:.3g} {unit}, lower bound {found.lower_bound * factor:.3g} {unit}, "
        f"gap {100 * found.gap:.1f} %"
    )


def _by_buckets(captured: Captured, layout: Layout, cap_bytes: int, stages: int) -> Choice:
    """Cut where DDP would begin a bucket; the cap decides how many stages that makes."""
    weights = {}
    for node in captured.graph.nodes:
        origin = captured.origins.get(node.name) if node.op == "placeholder" else None
        if origin is not None and origin.kind == "parameter" and origin.requires_grad:
            weights[node] = {origin.name: tensor_bytes(captured, node.meta["val"])}
    groups = group_nodes(captured.graph, weights, BucketRule(cap_bytes), legal=layout.legal)
    if len(groups) != stages:
        raise SplitError(
            f"a bucket of {cap_bytes} bytes makes {len(groups)} stages of this model, but {stages} were asked for; "
            f"set stages to {len(groups)}, or another size"
        )
    order = {node: i for i, node in enumerate(layout.nodes)}
    largest = max(group.size_bytes for group in groups)
    begins = (0, *(order[group.nodes[0]] for group in groups[1:]))
    return Choice(begins, f"buckets of {cap_bytes} bytes: the largest stage holds {largest / 2**20:.3g} MiB")


def _by_layers(layout: Layout, stages: int) -> Choice:
    begins = _layers(layout)
    ones = [0.0] * len(layout.nodes)
    for i in begins:
        ones[i] = 1.0
    found = partition(ones, [0.0] * len(ones), block_begins(layout, stages), stages)
    return Choice(found.begins, f"equal numbers of layers: at most {found.slowest:.0f} of {len(begins)} in a stage")


def _layers(layout: Layout) -> list[int]:
    """Return the positions where numbered modules begin."""
    begins: dict[str, int] = {}
    for i, node in enumerate(layout.nodes):
        layer = _layer_of(node)
        if node in layout.work and layer is not None:
            begins.setdefault(layer, i)
    return sorted(set(begins.values()))


def block_begins(layout: Layout, stages: int) -> list[int]:
    """Return the legal cuts where a numbered module begins. Raises SplitError if there are too few."""
    legal = sorted(set(_layers(layout)) & set(layout.legal))
    if stages - 1 > len(legal):
        raise SplitError(
            f'{stages} stages by "layers" or block boundaries, but only {len(legal) + 1} blocks can begin one; use "balanced"'
        )
    return legal


def module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the modules that made a node, outermost first."""
    return [str(path).partition("@")[0] for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _layer_of(node: fx.Node) -> str | None:
    """Return the outermost numbered module around a node: "transformer.h.3"."""
    for path in module_paths(node):
        if match := re.match(r"(?:.*?\.)?\d+(?=\.|$)", path):
            return match.group(0)
    return None


def _at_paths(layout: Layout, names: Sequence[str]) -> Choice:
    begins_at = _beginnings(layout)
    positions = [0]
    for name in names:
        if name not in begins_at:
            near = difflib.get_close_matches(name, begins_at, 3, 0.4)
            told = f"nearest: {', '.join(near)}" if near else _examples(layout, begins_at)
            raise SplitError(f"split: no operation of the model is in a module {name!r}; {told}")
        position = begins_at[name]
        if position not in set(layout.legal):
            usable = [other for other, at in begins_at.items() if at in set(layout.legal)]
            near = difflib.get_close_matches(name, usable, 3, 0.0)
            raise SplitError(
                f"split: no stage can begin at {name!r}: it is the model's first operation, or memory written in place "
                f"spans it; nearest that can: {', '.join(near) or 'none'}"
            )
        if position <= positions[-1]:
            raise SplitError(
                f"split: {name!r} runs before the path in front of it; list the paths in the order they run"
            )
        positions.append(position)
    return Choice(tuple(positions), f"at {', '.join(names)}" if names else "one stage")


def _examples(layout: Layout, begins_at: Mapping[str, int]) -> str:
    usable = [name for name, position in begins_at.items() if position in set(layout.legal)]
    if not usable:
        return 'no module of this model can begin a stage; use "balanced"'
    return f"a stage can begin at {', '.join(usable[:5])}" + (", …" if len(usable) > 5 else "")


def _beginnings(layout: Layout) -> dict[str, int]:
    """Return the position of the first work node of each module path, and of what only holds modules (a ModuleList)."""
    begins: dict[str, int] = {}
    for i, node in enumerate(layout.nodes):
        if node in layout.work:
            for path in module_paths(node):
                for part in accumulate(path.split("."), "{}.{}".format):
                    begins.setdefault(part, i)
    begins.pop("", None)
    return begins


def _at_nodes(layout: Layout, names: Sequence[str], stages: int) -> Choice:
    if len(names) != stages:
        raise SplitError(f"the plan names {len(names)} first nodes for {stages} stages")
    positions = [0]
    for name in names[1:]:
        position = layout.position(name)
        if position is None or position not in set(layout.legal) or position <= positions[-1]:
            raise SplitError(
                f"the plan begins a stage at {name!r}, where this capture has no legal cut: it was made for another model"
            )
        positions.append(position)
    return Choice(tuple(positions), "the cut of the published plan")
