"""Choose where stages begin: the policies of `split`, and the words for a choice that can't be met. Called by graph.cut."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import fx

from stagekit.errors import SplitError
from stagekit.graph.costs import Cost, measure
from stagekit.graph.layout import Layout
from stagekit.plan.partition import Partition, partition

if TYPE_CHECKING:
    from stagekit.graph.capture import Captured


@dataclass(frozen=True)
class Choice:
    """Positions in `Layout.nodes` where stages begin (the first is 0), and how they were found."""

    begins: tuple[int, ...]
    report: str
    costs: Mapping[str, Cost] = field(default_factory=dict)


def choose(
    captured: Captured,
    layout: Layout,
    split: str | Sequence[str],
    stages: int,
    at_nodes: Sequence[str] | None,
    *,
    measured: bool = True,
) -> Choice:
    """Return where the stages begin, and what each node costs if `measured`. Raises SplitError with the numbers or the
    nearest names. The cut of a published plan is not measured again.
    """
    if at_nodes is not None:
        return _at_nodes(layout, at_nodes, stages)
    choice = _chosen(captured, layout, split, stages)
    if measured and not choice.costs:
        choice = replace(choice, costs=_measured(captured, layout))
    return choice


def _chosen(captured: Captured, layout: Layout, split: str | Sequence[str], stages: int) -> Choice:
    if not isinstance(split, str):
        return _at_paths(layout, split, stages)
    if split == "balanced":
        return _balanced(captured, layout, stages)
    if split == "parameters":
        return _by_parameters(captured, layout, stages)
    if split == "layers":
        return _by_layers(layout, stages)
    raise SplitError(f'split is {split!r}; use "balanced", "parameters", "layers" or a list of module paths')


def _balanced(captured: Captured, layout: Layout, stages: int) -> Choice:
    costs = _measured(captured, layout)
    seconds = [0.0] * len(layout.nodes)
    for i, node in enumerate(layout.nodes):
        if node.name in costs:
            seconds[i] = costs[node.name].forward_s + costs[node.name].backward_s
    found = partition(seconds, layout.crossing_s(captured), layout.legal, stages)
    return Choice(found.begins, f"balanced on measured costs: {_gap(found, 1e3, 'ms')}", costs)


def _measured(captured: Captured, layout: Layout) -> Mapping[str, Cost]:
    return measure(captured, [node for node in layout.nodes if node in layout.work])


def _by_parameters(captured: Captured, layout: Layout, stages: int) -> Choice:
    counted: set[fx.Node] = set()
    sizes = [0.0] * len(layout.nodes)
    for i, node in enumerate(layout.nodes):
        for operand in node.all_input_nodes:
            origin = captured.origins.get(operand.name) if operand.op == "placeholder" else None
            if origin is not None and origin.kind == "parameter" and operand not in counted:
                counted.add(operand)
                sizes[i] += operand.meta["val"].numel() * operand.meta["val"].element_size()
    found = partition(sizes, [0.0] * len(sizes), layout.legal, stages)
    return Choice(found.begins, f"balanced on parameter bytes: {_gap(found, 2**-20, 'MiB')}")


def _gap(found: Partition, factor: float, unit: str) -> str:
    gap = found.slowest / found.lower_bound - 1 if found.lower_bound > 0 else 0.0
    return (
        f"largest stage {found.slowest * factor:.3g} {unit}, lower bound {found.lower_bound * factor:.3g} {unit}, "
        f"gap {100 * gap:.1f} %"
    )


def _by_layers(layout: Layout, stages: int) -> Choice:
    begins: dict[str, int] = {}
    for i, node in enumerate(layout.nodes):
        layer = _layer_of(node)
        if node in layout.work and layer is not None:
            begins.setdefault(layer, i)
    legal = sorted({i for i in begins.values() if i in set(layout.legal)})
    if stages - 1 > len(legal):
        raise SplitError(f'{stages} stages by "layers", but only {len(legal) + 1} layers can begin one; use "balanced"')
    ones = [0.0] * len(layout.nodes)
    for i in begins.values():
        ones[i] = 1.0
    found = partition(ones, [0.0] * len(ones), legal, stages)
    return Choice(found.begins, f"equal numbers of layers: at most {found.slowest:.0f} of {len(begins)} in a stage")


def module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the modules that made a node, outermost first."""
    return [str(path).partition("@")[0] for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _layer_of(node: fx.Node) -> str | None:
    """Return the outermost numbered module around a node: "transformer.h.3"."""
    for path in module_paths(node):
        if match := re.match(r"(?:.*?\.)?\d+(?=\.|$)", path):
            return match.group(0)
    return None


def _at_paths(layout: Layout, names: Sequence[str], stages: int) -> Choice:
    if len(names) != stages - 1:
        raise SplitError(
            f"{len(names)} module paths make {len(names) + 1} stages, but {stages} were asked for; a path names where "
            "a stage after the first begins"
        )
    begins_at = _beginnings(layout)
    positions = [0]
    for name in names:
        if name not in begins_at:
            near = difflib.get_close_matches(name, begins_at, 3, 0.4)
            raise SplitError(
                f"split: no operation of the model is in a module {name!r}; nearest: {', '.join(near) or 'none'}"
            )
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


def _beginnings(layout: Layout) -> dict[str, int]:
    """Return the position of the first work node of each module path."""
    begins: dict[str, int] = {}
    for i, node in enumerate(layout.nodes):
        if node in layout.work:
            for path in module_paths(node):
                begins.setdefault(path, i)
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
