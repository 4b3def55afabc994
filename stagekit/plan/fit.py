"""Costs fitted to recorded steps: what each stage's actions and a hop really took, overheads included. Pure.

From a run of one schedule follow predictions of every other on the same stages: `fit_costs` of a gpipe run and
stagekit.plan.trial. `Timed` comes from a run's recorder (stagekit.run.stats), `timed_of` reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, Protocol

from stagekit.errors import UserError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.costs import Costs


class Timed(NamedTuple):
    """One action of a step: it waited for `wait_s` before `start_s`; seconds on a clock that all ranks share."""

    action: Action
    start_s: float
    end_s: float
    wait_s: float = 0.0


class Recorded(Protocol):
    """What a run's recorder holds of its last step."""

    actions: Sequence[Action]

    @property
    def start_ns(self) -> Sequence[int]: ...
    @property
    def end_ns(self) -> Sequence[int]: ...
    @property
    def wait_ns(self) -> Sequence[int]: ...


def timed_of(recorded: Recorded, *, offset_ns: int = 0) -> list[Timed]:
    """Return the last step of a rank; `offset_ns` takes its clock to the one that all share."""
    return [
        Timed(action, (start + offset_ns) * 1e-9, (end + offset_ns) * 1e-9, wait * 1e-9)
        for action, start, end, wait in zip(
            recorded.actions, recorded.start_ns, recorded.end_ns, recorded.wait_ns, strict=True
        )
    ]


def fit_costs(
    steps: Sequence[Sequence[Sequence[Timed]]],
    stage_ranks: Sequence[int],
    *,
    halves: Sequence[tuple[float, float]] = (),
) -> Costs:
    """Return the mean cost of each stage's F and B and of a hop, out of `steps[number][rank]`: a step sums many.

    An action costs its rank the time until the next one begins or begins to wait: with the transfers around it. `halves`:
    per stage the shares of a full backward that I and W take, where it can be parted; by default I is all of it. Raises
    UserError where a stage was not seen forward and backward.
    """
    took: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for ranks in steps:
        for row in ranks:
            for (is_forward, stage), seconds in _occupied(row):
                took[is_forward, stage].append(seconds)
    num = len(stage_ranks)
    for stage in range(num):
        for is_forward in (True, False):
            if not took[is_forward, stage]:
                raise UserError(
                    f"stage {stage} ran no full {'forward' if is_forward else 'backward'} in the recorded steps; fit costs to "
                    "steps of a schedule with whole backwards, such as gpipe"
                )
    forward = tuple(fmean(took[True, stage]) for stage in range(num))
    backward = tuple(fmean(took[False, stage]) for stage in range(num))
    shares = halves or [(1.0, 0.0)] * num
    hops = [seconds for ranks in steps for seconds in _hops(ranks, stage_ranks)]
    return Costs(
        forward,
        tuple(whole * early for whole, (early, _) in zip(backward, shares, strict=True)),
        tuple(whole * late for whole, (_, late) in zip(backward, shares, strict=True)),
        fmean(hops) if hops else 0.0,
        backward=backward,
    )


def _occupied(row: Sequence[Timed]) -> Iterator[tuple[tuple[bool, int], float]]:
    """Yield (is forward, stage) and the seconds of each F and B of a rank's step."""
    computed = [timed for timed in row if timed.action.op in COMPUTE]
    for timed, after in pairwise(computed):
        if timed.action.op in (Op.F, Op.B):
            yield (timed.action.op is Op.F, timed.action.stage), after.start_s - after.wait_s - timed.start_s
    if computed and computed[-1].action.op in (Op.F, Op.B):
        last = computed[-1]
        yield (last.action.op is Op.F, last.action.stage), last.end_s - last.start_s


def _hops(ranks: Sequence[Sequence[Timed]], stage_ranks: Sequence[int]) -> Iterator[float]:
    """Yield how long after its maker's end each consumer began that was waiting by then."""
    ends = {
        (timed.action.op is Op.F, timed.action.stage, timed.action.chunk): timed.end_s
        for row in ranks
        for timed in row
        if timed.action.op in (Op.F, Op.B, Op.I)
    }
    for row in ranks:
        for timed in row:
            op, stage, chunk, _ = timed.action
            maker = stage - 1 if op is Op.F else stage + 1
            if op not in (Op.F, Op.B) or not 0 <= maker < len(stage_ranks) or stage_ranks[maker] == stage_ranks[stage]:
                continue
            made = ends.get((op is Op.F, maker, chunk))
            if made is not None and timed.start_s - timed.wait_s <= made <= timed.start_s:
                yield timed.start_s - made
