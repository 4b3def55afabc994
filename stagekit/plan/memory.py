"""What a stage of a chain holds in memory, and which stages fit under a cap. Pure; the numbers come from graph.memory.

A stage holds a thing once, however many of its nodes touch it: a parameter with its gradient and optimizer state, or
what autograd saves of one chunk, as often as chunks are in flight there. plan.partition asks where a stage may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from stagekit.errors import SplitError
from stagekit.plan.actions import Action, Op
from stagekit.plan.schedules.registry import PerRank, compute_order, is_forward_only, stage_table

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_units(size_bytes: float) -> str:
    """Return a size for people, in the unit in which it has 1 to 4 digits: "160 bytes", "1.5 GiB"."""
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:.4g} {_UNITS[unit]}"


@dataclass(frozen=True, slots=True)
class Held:
    """A thing that the nodes at `positions` (ascending) touch; bytes once, and bytes per chunk in flight."""

    positions: tuple[int, ...]
    fixed_bytes: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the nodes of a chain hold; `received[i]`: bytes a chunk that a stage beginning at i is sent and keeps besides."""

    held: tuple[Held, ...]
    received: tuple[int, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """`chunks[stage]` are in flight at once in a stage; `workspace_bytes` every stage needs besides; the cap is per stage."""

    held: tuple[Held, ...]
    chunks: tuple[int, ...]
    cap_bytes: float
    workspace_bytes: int = 0

    def stage_bytes(self, stage: int, begin: int, end: int) -> int:
        """Return what nodes [begin, end) hold as stage number `stage`."""
        total = self.workspace_bytes
        for thing in self.held:
            if any(begin <= position < end for position in thing.positions):
                total += thing.fixed_bytes + self.chunks[stage] * thing.chunk_bytes
        return total

    def earliest(self, stage: int, bounds: Sequence[int]) -> list[int]:
        """Return per index j into `bounds` the smallest i such that nodes [bounds[i], bounds[j]) fit; j where none does."""
        touching: list[list[int]] = [[] for _ in range(bounds[-1])]
        for number, thing in enumerate(self.held):
            for position in thing.positions:
                touching[position].append(number)
        sizes = [thing.fixed_bytes + self.chunks[stage] * thing.chunk_bytes for thing in self.held]
        touches = [0] * len(self.held)
        total, first, result = self.workspace_bytes, 0, [0]
        for j in range(1, len(bounds)):
            for position in range(bounds[j - 1], bounds[j]):
                for number in touching[position]:
                    total += 0 if touches[number] else sizes[number]
                    touches[number] += 1
            while total > self.cap_bytes and first < j:
                for position in range(bounds[first], bounds[first + 1]):
                    for number in touching[position]:
                        touches[number] -= 1
                        total -= 0 if touches[number] else sizes[number]
                first += 1
            result.append(first)
        return result


def chunks_in_flight(schedule: str, stages: int, stages_per_rank: PerRank, chunks: int) -> tuple[int, ...]:
    """Return per stage how many chunks are at most between their F and their B or W; 1 where there are forwards alone.

    Raises ScheduleError.
    """
    if is_forward_only(schedule):
        return (1,) * stages
    table = stage_table(schedule, stages, stages_per_rank)
    return held_at_most(compute_order(schedule, table, max(table) + 1, chunks), stages)


def held_at_most(orders: Sequence[Sequence[Action]], stages: int) -> tuple[int, ...]:
    """Return per stage how many chunks of compute lists are at most between their F and their B or W."""
    held, peak = [0] * stages, [0] * stages
    for row in orders:
        for action in row:
            held[action.stage] += 1 if action.op is Op.F else -1 if action.op in (Op.B, Op.W) else 0
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)


def refuse(memory: Memory, bounds: Sequence[int], stages_per_rank: int) -> SplitError:
    """Return the error for a cap under which no cut exists: what the best one needs, and where."""
    low, high = (
        0.0,
        float(memory.stage_bytes(max(range(len(memory.chunks)), key=memory.chunks.__getitem__), 0, bounds[-1])),
    )
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if _fitting(replace(memory, cap_bytes=middle), bounds) else (middle, high)
    begins = _fitting(replace(memory, cap_bytes=high), bounds)
    assert begins is not None
    needs = [memory.stage_bytes(k, bounds[a], bounds[b]) for k, (a, b) in enumerate(pairwise(begins))]
    worst = needs.index(max(needs))
    shared = f" (each of {stages_per_rank} stages of a rank gets its share of the cap)" if stages_per_rank > 1 else ""
    return SplitError(
        f"no cut into {len(memory.chunks)} stages fits the memory cap: the best one needs {in_units(needs[worst])} in stage "
        f"{worst} with {memory.chunks[worst]} chunks in flight, the cap is {in_units(memory.cap_bytes)}{shared}; "
        "use more stages, smaller or fewer chunks, or recompute"
    )


def _fitting(memory: Memory, bounds: Sequence[int]) -> list[int] | None:
    """Return indices into `bounds` where stages begin, and the end, such that each stage fits; None if none do."""
    num = len(bounds)
    reached = [True] + [False] * (num - 1)
    parents: list[list[int]] = []
    for stage in range(len(memory.chunks)):
        earliest = memory.earliest(stage, bounds)
        last = [-1] * num  # the largest reachable index below j
        for j in range(1, num):
            last[j] = j - 1 if reached[j - 1] else last[j - 1]
        parents.append(last)
        reached = [last[j] >= 0 and last[j] >= earliest[j] for j in range(num)]
    if not reached[-1]:
        return None
    begins = [num - 1]
    for last in reversed(parents):
        begins.append(last[begins[-1]])
    return begins[::-1]
