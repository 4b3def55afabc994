"""Where an eval capture is cut, so that its stages run on the tensors of the stages that train.

A model in eval mode is another graph: no dropout, BatchNorm by its statistics, perhaps other outputs. `cut_like` chooses
positions at which every stage reads only parameters and buffers that the training stage of the same number owns, and
among those the ones where the least crosses. A stage of which eval mode leaves nothing is empty. Called through
`Captured.cut_like`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import fx

from stagekit.errors import SplitError
from stagekit.graph.cut.choose import Choice
from stagekit.graph.cut.cut import Cut, cut
from stagekit.graph.cut.layout import Layout, lay_out

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured


def cut_like(captured: Captured, train: Cut) -> Cut:
    """Return `captured` cut to the ownership of `train`; see `Captured.cut_like`."""
    layout = lay_out(captured)
    allowed = list(_allowed(captured, layout, _owners(train)))
    crossing, stages = layout.crossing_s(captured), len(train.spec.stages)
    ends = [*layout.legal, len(allowed)]
    begins = _cheapest(allowed, crossing, ends, stages) or _cheapest(allowed, crossing, [0, *ends], stages, empty=True)
    if begins is None:
        raise SplitError(_why_not(captured, layout, train))
    return cut(
        captured,
        "balanced",
        stages,
        buckets=None,
        at_nodes=None,
        measured=False,
        choice=Choice(begins, "the cut of training"),
    )


def _owners(train: Cut) -> dict[str, frozenset[int]]:
    owners: dict[str, set[int]] = {}
    for stage in train.spec.stages:
        for name in (*(parameter.name for parameter in stage.parameters), *stage.buffers):
            owners.setdefault(name, set()).add(stage.index)
    return {name: frozenset(stages) for name, stages in owners.items()}


def _states(captured: Captured, layout: Layout, node: fx.Node) -> Iterator[str]:
    """Yield the parameters and buffers that a work node reads, also through nodes that every stage computes again."""
    todo, seen = list(node.all_input_nodes), set[fx.Node]()
    while todo:
        operand = todo.pop()
        if operand in seen:
            continue
        seen.add(operand)
        if operand.op == "placeholder":
            origin = captured.origins[operand.name]
            if origin.kind in ("parameter", "buffer"):
                yield origin.name
        elif operand in layout.free:
            todo += operand.all_input_nodes


def _allowed(captured: Captured, layout: Layout, owners: dict[str, frozenset[int]]) -> Iterator[frozenset[int] | None]:
    """Yield per node the stages that own all it reads; None where any stage may hold it."""
    for node in layout.nodes:
        stages: frozenset[int] | None = None
        for name in _states(captured, layout, node) if node in layout.work else ():
            held = owners.get(name, frozenset())
            stages = held if stages is None else stages & held
        yield stages


def _cheapest(
    allowed: Sequence[frozenset[int] | None],
    crossing: Sequence[float],
    ends: Sequence[int],
    stages: int,
    empty: bool = False,
) -> tuple[int, ...] | None:
    """Return the positions out of `ends` where stages begin with the least sum of `crossing`, None if there are none.

    `empty`: a stage may hold nothing, where all that it holds in training is left out in eval mode.

    best[p]: cost of the stages so far if the next one begins at p. A stage reaches back over nodes that it may hold, so
    its possible beginnings are a window that moves to the right: a monotone queue gives the best of them.
    """
    best = {0: 0.0}
    came: list[dict[int, int]] = []
    for stage in range(stages):
        forbidden = _last_forbidden(allowed, stage)
        reached: dict[int, float] = {}
        source: dict[int, int] = {}
        window: deque[int] = deque()
        candidates = iter(sorted(best))
        upcoming = next(candidates, None)
        for end in ends if stage < stages - 1 else ends[-1:]:
            while upcoming is not None and (upcoming < end or (empty and upcoming == end)):
                while window and best[window[-1]] >= best[upcoming]:
                    window.pop()
                window.append(upcoming)
                upcoming = next(candidates, None)
            while window and window[0] <= forbidden[end]:
                window.popleft()
            if window:
                reached[end] = best[window[0]] + (crossing[end] if end < len(allowed) else 0.0)
                source[end] = window[0]
        best = reached
        came.append(source)
    return _walk_back(came, len(allowed))


def _last_forbidden(allowed: Sequence[frozenset[int] | None], stage: int) -> list[int]:
    """Return per position the last node before it that `stage` may not hold, -1 if there is none."""
    last, result = -1, [-1]
    for i, stages in enumerate(allowed):
        if stages is not None and stage not in stages:
            last = i
        result.append(last)
    return result


def _walk_back(came: Sequence[dict[int, int]], end: int) -> tuple[int, ...] | None:
    begins: list[int] = []
    for source in reversed(came):
        if end not in source:
            return None
        end = source[end]
        begins.append(end)
    return tuple(reversed(begins))


def _why_not(captured: Captured, layout: Layout, train: Cut) -> str:
    owners, highest, before = _owners(train), 0, ""
    trained = {state.name for stage in train.graphs for state in stage.states}
    for node in layout.nodes:
        for name in _states(captured, layout, node) if node in layout.work else ():
            if name not in owners:
                return f"the model in eval mode reads {name}, which no stage of the cut for training owns"
            stage = max(owners[name])
            if stage < highest and not {name, before} <= trained:
                unread, other = (name, before) if name not in trained else (before, name)
                return (
                    f"the model in eval mode reads {name} (stage {stage}) after {before} (stage {highest}); training never "
                    f"reads {unread}, which therefore lies beside what is registered before it: create it in __init__ "
                    f"{'after' if unread == name else 'before'} {other}, in the order of forward"
                )
            if stage < highest:
                return (
                    f"the model in eval mode reads {name} (stage {stage} of the cut for training) after "
                    f"{before} (stage {highest}); cut for training at a place that keeps them together"
                )
            if min(owners[name]) > highest:
                highest, before = min(owners[name]), name
    return (
        f"the model in eval mode has no legal cut into {len(train.spec.stages)} stages that fits the cut for training; "
        "use fewer stages, or other places"
    )
