"""What the planner compares: schedules × stages per rank × chunk counts, of those that a user left free. Pure.

Decides which there are and in which words a choice is told; what they cost is found by stagekit.plan.planner.search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from stagekit.errors import ScheduleError
from stagekit.plan.costs import Costs
from stagekit.plan.schedules.registry import AUTOMATIC, NAMES, SCHEDULES, compute_order, table_for
from stagekit.plan.schedules.tables import Orders
from stagekit.plan.timeline import Timeline

AUTO = "auto"  # of a schedule, of chunks, of stages per rank: choose
MOST_STAGES_PER_RANK = 4
MOST_CHUNKS = 256
_ZB_LIMITS = (1.0, 2.0)  # × what 1F1B holds
_SEARCHED = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run. `memory_limit` is zb-auto's, in (stage, chunk) activations of a rank; None: as 1F1B."""

    schedule: str
    stages_per_rank: int
    chunks: int
    memory_limit: float | None = None

    def __str__(self) -> str:
        stages = "" if self.stages_per_rank == 1 else f", {self.stages_per_rank} stages per rank"
        limit = "" if self.memory_limit is None else f" (at most {self.memory_limit:g} activations)"
        return f"{self.schedule}{limit}{stages}, {self.chunks} chunks"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate would take; begins, costs and the rest are empty where `refusal` says why it can't be."""

    candidate: Candidate
    begins: tuple[int, ...] = ()
    stage_ranks: tuple[int, ...] = ()
    costs: Costs | None = None
    orders: Orders = ()
    step_s: float = float("inf")
    bubble: float = 1.0
    rank_bytes: tuple[int, ...] = ()
    refusal: str = ""
    needs_bytes: int = 0  # of the fullest rank, where memory refuses it
    timeline: Timeline | None = None

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank holds; 0 where nothing is known of memory."""
        return max(self.rank_bytes, default=0)


@dataclass(frozen=True, slots=True)
class Wish:
    """What may be chosen: one entry is fixed by the user, several are free."""

    ranks: int
    schedules: tuple[str, ...]
    stages_per_rank: tuple[int, ...]
    chunks: tuple[int, ...]

    def candidates(self) -> Iterator[Candidate]:
        """Yield every combination that can be and is not another one under a second name; a free search of zb-auto is
        left for `searched`.
        """
        for schedule in self.schedules:
            for per_rank in self.stages_per_rank:
                if len(self.schedules) > 1 and not self._is_worth_trying(schedule, per_rank):
                    continue
                for chunks in self.chunks:
                    yield Candidate(schedule, per_rank, chunks)

    def _is_worth_trying(self, schedule: str, per_rank: int) -> bool:
        if self.ranks == 1:  # nothing is gained by any
            return schedule == "1f1b" and per_rank == min(self.stages_per_rank)
        return is_worth_trying(schedule, per_rank, self.ranks)

    def searched(self, fastest: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield zb-auto where the fastest of the others are: a search takes as long as all of them."""
        if len(self.schedules) == 1 or AUTOMATIC not in self.schedules or self.ranks == 1:
            return
        shapes = list(dict.fromkeys((each.stages_per_rank, each.chunks) for each in fastest))[:_SEARCHED]
        for per_rank, chunks in shapes:
            for times in _ZB_LIMITS:
                yield Candidate(AUTOMATIC, per_rank, chunks, times * self.ranks * per_rank)


def schedules_for(schedule: str, *, tables: str = "any") -> tuple[str, ...]:
    """Return the schedules that `schedule` leaves open; `tables`: "modulo" leaves those out whose ranks are V-shaped."""
    if schedule != AUTO:
        return (schedule,)
    training = [name for name in NAMES if name != "forward"]
    return tuple(name for name in training if tables == "any" or not is_v_shaped(name))


def is_v_shaped(schedule: str) -> bool:
    """Say whether a rank's two stages are the two arms of a V."""
    return schedule in SCHEDULES and table_for(schedule, 4, 2) != table_for("gpipe", 4, 2)


@cache
def is_worth_trying(schedule: str, stages_per_rank: int, ranks: int) -> bool:
    """Say whether a schedule takes so many stages per rank, and is not another one under a second name: with a stage per
    rank bfs is gpipe, and interleaved 1f1b; with several bfs is gpipe too. `ranks` are at least 2.
    """
    if schedule in (AUTOMATIC, "bfs") or (stages_per_rank == 1 and schedule == "interleaved"):
        return False
    try:
        compute_order(schedule, table_for(schedule, 2 * stages_per_rank, 2), 2, 4)
    except ScheduleError:
        return False
    return True


def stages_per_rank_up_to(legal_cuts: int, ranks: int) -> tuple[int, ...]:
    """Return how many stages a rank can have of a model with so many legal cuts, at most MOST_STAGES_PER_RANK."""
    return tuple(v for v in range(1, MOST_STAGES_PER_RANK + 1) if ranks * v - 1 <= legal_cuts) or (1,)


def chunk_counts(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the counts to try for a batch of `rows`: its divisors from the number of ranks on, up to eight times it.

    Those that leave no remainder, so that every chunk costs the same; 1 where there is none.
    """
    fitting = [c for c in range(1, min(rows, MOST_CHUNKS) + 1) if rows % c == 0 and ranks <= c <= 8 * ranks]
    return tuple(fitting) or (max(c for c in range(1, min(rows, MOST_CHUNKS) + 1) if rows % c == 0),)
