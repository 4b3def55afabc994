"""Which attempt stands still, and which rank keeps the others waiting: one pure function over where the ranks are.

A rank is stuck when it has not moved for longer than its section may take. From a stuck one the waiting is followed to
the rank that waits for nobody: that one is blamed if it is stuck itself, so a victim never is. A silent rank, which has
stopped saying where it is, counts before those that still say it. Where one rank is not heard of, nothing is decided:
absence stops nothing; a rank of a lost node is blamed only once others stand still.
Called by `coordinator.hangs`, which collects the sightings and posts what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piped.core.events import HangFound
from piped.core.model import Attempt, AttemptState, Failure, FailureReason, JobSpec, Node, NodeState

FIRST_STEP = "first step"
COMPILED_STEP = "compiled step"
STEP = frozenset({"step", COMPILED_STEP, "update", "clip"})
STEP_S = 10.0  # at least; scheduling and a page of swap must not look like a hang
COMPILED_STEP_S = 120.0  # a chunk of another shape has the stage compiled again
STEPS = 5.0  # of the longest ones
LIMITS_S = {"data": 120.0, "eval": 120.0, "hook": 120.0, "save": 900.0}  # without a sign from code that isn't ours
OTHER_S = 120.0
LONGEST_S = max(LIMITS_S.values())
SILENT_S = 2.5  # a rank says where it is once a second
LEAST_S = 4.0  # whatever a job asks for: who is silent must be known by then


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is, as it says itself; `silent_s`: since it said so."""

    step: int = 0  # finished
    section: str = ""
    action: str = ""
    waiting_on: tuple[int, ...] = ()
    waits_for_all: bool = False
    age_s: float = 0.0
    silent_s: float = 0.0
    longest_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A position and when this coordinator was told of the rank for the first and for the last time."""

    position: Position
    first_s: float
    last_s: float

    def still_s(self, now_s: float, since_s: float = 0.0) -> float:
        """Return for how long the rank has not moved, in this coordinator's life: what was before it saw, does not count.

        `since_s`: since it was heard of for the last time, where that counts.
        """
        return min(self.position.age_s + self.position.silent_s + since_s, now_s - self.first_s)


def limit_s(spec: JobSpec, position: Position, longest_step_s: float) -> float:
    """Return how long a rank may stay where it is without moving."""
    if spec.hang_timeout_s:
        return max(LEAST_S, float(spec.hang_timeout_s))
    if position.section == FIRST_STEP or not position.step:  # data are opened and stages compiled in it
        return float(spec.start_timeout_s)
    if position.section in STEP:
        least_s = COMPILED_STEP_S if position.section == COMPILED_STEP else STEP_S
        return max(least_s, STEPS * longest_step_s)
    return LIMITS_S.get(position.section, OTHER_S)


def find(
    attempt: Attempt, spec: JobSpec, nodes: Mapping[str, Node], seen: Mapping[int, Sighting], now_s: float
) -> HangFound | None:
    """Return the hang of a running attempt, or None. `seen` is by rank, its times and `now_s` of one clock."""
    if attempt.state is not AttemptState.RUNNING:
        return None
    look = _Look(attempt, spec, nodes, seen, now_s)
    if not look.stuck or look.is_blind:
        return None
    sinks = sorted(look.stuck & look.silent) or look.sinks()
    if not sinks:
        return look.blame_nobody() if look.stuck.issuperset(look.living) else None
    blamed = [rank for rank in sinks if rank in look.stuck or rank in look.overdue]
    if not blamed:
        return None  # who is waited for still moves, or may take longer
    return look.blame(max(blamed, key=lambda rank: (look.still_s(rank), -rank)), blamed)


class _Look:
    """The ranks of one attempt at one moment."""

    def __init__(
        self, attempt: Attempt, spec: JobSpec, nodes: Mapping[str, Node], seen: Mapping[int, Sighting], now_s: float
    ) -> None:
        self._attempt, self._seen, self._now_s = attempt, seen, now_s
        self.living, self.gone, self.is_blind = set[int](), set[int](), False
        for each in attempt.placement:
            node, worker = nodes.get(each.node_id), attempt.workers[each.rank]
            if worker.has_ended or worker.is_done:
                continue  # it waits for nobody any more, or its failure stops the attempt by itself
            if node is None or node.is_gone:
                self.gone.add(each.rank)
            elif node.state is NodeState.READY and each.rank in seen:
                self.living.add(each.rank)
            else:
                self.is_blind = True
        self.silent = {rank for rank in self.living if seen[rank].position.silent_s >= SILENT_S}
        longest_s = max((seen[rank].position.longest_step_s for rank in self.living), default=0.0)
        self._everyone = frozenset(self.living | self.gone)
        self.stuck = {
            rank for rank in self.living if self.still_s(rank) > limit_s(spec, seen[rank].position, longest_s)
        }
        most_s = max((self.still_s(rank) for rank in self.stuck), default=0.0)
        self.overdue = {  # of those that are gone: what they were at when they were last heard of may take its time
            rank
            for rank in self.gone
            if (
                self.still_s(rank) > limit_s(spec, seen[rank].position, longest_s)
                if rank in seen
                else most_s > LONGEST_S
            )
        }

    def still_s(self, rank: int) -> float:
        if rank not in self._seen:
            return 0.0
        since_s = self._now_s - self._seen[rank].last_s if rank in self.gone else 0.0
        return self._seen[rank].still_s(self._now_s, since_s)

    def waits_for(self, rank: int) -> frozenset[int]:
        """Return the ranks that `rank` waits for, those that have ended left out; what a silent one said is past."""
        if rank in self.gone or rank in self.silent:
            return frozenset()
        position = self._seen[rank].position
        there = self._everyone
        return (there if position.waits_for_all else there.intersection(position.waiting_on)) - {rank}

    def _is_waiting(self, rank: int) -> bool:
        if rank in self.gone or rank in self.silent:
            return False
        return (self._seen[rank].position.waits_for_all and len(self._everyone) > 1) or bool(self.waits_for(rank))

    def sinks(self) -> list[int]:
        """Return the ranks that stuck ones wait for, by way of others, and that wait for nobody."""
        reached, new = set[int](), set(self.stuck)
        while new:
            reached |= new
            if any(
                rank in self._seen and self._seen[rank].position.waits_for_all
                for rank in new & self.living - self.silent
            ):
                reached = set(self._everyone)
                break
            new = {other for rank in new for other in self.waits_for(rank)} - reached
        return sorted(rank for rank in reached if not self._is_waiting(rank))

    def blame(self, rank: int, sinks: list[int]) -> HangFound:
        place = self._attempt.placement[rank]
        step = self._steps_of(rank)
        if rank in self.gone:
            reason, told = FailureReason.NODE_LOST, f"contact with node {place.node_name} was lost"
        else:
            reason, told = FailureReason.HANG, self._describe(rank)
        others = ", ".join(str(each) for each in sinks if each != rank)
        tie = f" (so do ranks {others}; which stopped first is not known)" if others else ""
        message = f"{told}{tie}{self._waiters()}"
        return HangFound(self._attempt.fence, Failure(reason, message, rank, place.node_name, place.stages, step=step))

    def blame_nobody(self) -> HangFound:
        step = min(self._seen[rank].position.step for rank in self.living)
        message = f"every rank waits for another one: look at the network between their nodes{self._waiters()}"
        return HangFound(self._attempt.fence, Failure(FailureReason.HANG, message, step=step))

    def _steps_of(self, rank: int) -> int:
        """Return the steps that a rank has finished; of a silent one the others know more, for all end a step together."""
        heard = [self._seen[each].position.step for each in self.living - self.silent]
        own = self._seen[rank].position.step if rank in self._seen else 0
        return max(own, min(heard, default=0)) if rank in self.silent | self.gone else own

    def _describe(self, rank: int) -> str:
        position, step = self._seen[rank].position, self._steps_of(rank)
        is_step = position.section in STEP or position.section == FIRST_STEP
        where = f"step {step + 1}" if is_step else f"{position.section or 'an unknown place'} after step {step}"
        at = f", at {position.action}" if position.action else ""
        told = f"made no progress for {self.still_s(rank):.0f} s in {where}{at}"
        if rank not in self.silent:
            return told
        return (
            f"{told}, and said nothing for {position.silent_s:.0f} s: stopped, or stuck without releasing Python's lock"
        )

    def _waiters(self) -> str:
        told = []
        for rank in sorted(self.living):
            position, whom = self._seen[rank].position, self.waits_for(rank)
            if whom and position.age_s > 0.0:
                names = "all others" if position.waits_for_all else " and ".join(map(str, sorted(whom)))
                told.append(f"rank {rank} waits for {names}{f' at {position.action}' if position.action else ''}")
        more = f"; and {len(told) - 8} more" if len(told) > 8 else ""
        return f"; {'; '.join(told[:8])}{more}" if told else ""
