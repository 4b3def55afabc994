"""The schedules of a job file, and what each asks of the numbers beside it.

The orders themselves are stagekit's, which a client need not have; a test holds this, the coordinator's rules and stagekit's
together. Called by pipeapi.jobspec.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

ONE_PER_RANK = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2")
FORWARD = "forward"  # no backward: for programs whose mode is "forward"
AUTO = "auto"  # the worker that plans takes the fastest, on costs that it measures
CHOSEN = 0  # a number of chunks that is chosen likewise
V_SHAPED = ("zb-v", "v-half", "dualpipe-v")  # two per rank: up the ranks and down again
MAX_STAGES = 4096
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "eager-1f1b", "dualpipe-v", "forward",
    "zb-auto",
)  # fmt: skip


def misfit(schedule: str, stages: int, stages_per_rank: int, chunks: int) -> tuple[str, str] | None:
    """Return the field that doesn't suit `schedule` and what would do; None where all fit. The counts are at least 1 (or
    `chunks` CHOSEN) and `stages_per_rank` divides `stages`.
    """
    ranks = stages // stages_per_rank
    if schedule in V_SHAPED and stages_per_rank != 2:
        even = "" if stages % 2 == 0 else f" and stages: {stages + 1}"
        return (
            "stages_per_rank",
            f"is {stages_per_rank}, but {schedule} runs 2 stages on each rank, up the ranks and down again; write "
            f"stages_per_rank: 2{even}",
        )
    if schedule in ONE_PER_RANK and stages_per_rank > 1 and ranks > 1:
        return (
            "stages_per_rank",
            f"is {stages_per_rank}, but {schedule} runs 1 stage on each rank; write stages_per_rank: 1, or schedule: "
            "interleaved",
        )
    if schedule == "forward" and chunks == CHOSEN:
        return "chunks", "is auto, which compares training steps, but schedule is forward; write a number"
    if schedule == "dualpipe-v" and chunks != CHOSEN and chunks < 2 * ranks:
        return (
            "chunks",
            f"is {chunks}, but dualpipe-v on {ranks} ranks needs at least {2 * ranks}; write chunks: {2 * ranks}, or "
            "schedule: zb-v",
        )
    return None


_FORWARD = re.compile(r"(?<!\w)(\d+)F(\d+)(?!\w)")
_BACKWARD = re.compile(r"(?<!\w)\d+[BIW]\d+(?!\w)")


def is_file(schedule: str) -> bool:
    """Say whether `schedule` names a CSV file, which travels with the job."""
    return schedule.lower().endswith(".csv")


def csv_trains(text: str) -> bool:
    """Say whether a schedule file lists a backward, or a half of one."""
    return _BACKWARD.search(text) is not None


@functools.lru_cache(maxsize=64)
def csv_forwards(text: str) -> tuple[tuple[int, ...], int, int]:
    """Return what a schedule file says: the rank of each stage (-1: none), its ranks, its chunks.

    Whether its lists can run is stagekit's to say.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    where: dict[int, int] = {}
    chunks = 0
    for rank, line in enumerate(lines):
        for stage, chunk in _FORWARD.findall(line):
            where.setdefault(int(stage), rank)
            chunks = max(chunks, int(chunk) + 1)
    known = min(max(where, default=-1) + 1, MAX_STAGES)
    return tuple(where.get(stage, -1) for stage in range(known)), len(lines), chunks


def csv_misfit(text: str, stages: int, per_rank: Sequence[int], chunks: int) -> tuple[str, str] | None:
    """Return the field that doesn't suit a schedule file and what would do; `per_rank` is empty where none was asked."""
    table, ranks, chunks_there = csv_forwards(text)
    counts = tuple(table.count(rank) for rank in range(ranks))
    if not table or -1 in table:
        missing = table.index(-1) if table else 0
        return "schedule", f"lists no forward of stage {missing}; write a line per rank, e.g. 0F0,0F1,0B0,0B1"
    if 0 in counts:
        return "schedule", f"lists no forward in line {counts.index(0) + 1}; each rank needs a stage"
    if stages != len(table):
        return "stages", f"is {stages}, but the schedule file has {len(table)}; write stages: {len(table)}"
    if chunks != chunks_there:
        return "chunks", f"is {chunks or AUTO}, but the schedule file has {chunks_there}; write chunks: {chunks_there}"
    if per_rank and tuple(per_rank) != counts:
        return "stages_per_rank", f"is {list(per_rank)}, but the schedule file has {list(counts)}; leave it out"
    return None


def blocks_misfit(schedule: str, stages: int, per_rank: Sequence[int], chunks: int) -> tuple[str, str] | None:
    """Return the field that doesn't suit `schedule` where rank r holds the next `per_rank[r]` stages, as `misfit` does."""
    if min(per_rank) < 1 or sum(per_rank) != stages:
        told = (
            f"is {list(per_rank)}, which adds up to {sum(per_rank)}, but stages is {stages}; give each rank at least 1"
        )
        return "stages_per_rank", told
    if schedule == AUTO or chunks == CHOSEN:
        told = f"is {list(per_rank)}, but what chooses a schedule or chunks takes one number for all ranks; write one"
        return "stages_per_rank", told
    if schedule in V_SHAPED and tuple(per_rank) == (2,):
        return misfit(schedule, stages, 2, chunks)
    if schedule in V_SHAPED or (schedule == "interleaved" and max(per_rank) > 1 < len(per_rank)):
        each = 2 if schedule in V_SHAPED else -(-stages // len(per_rank))
        return (
            "stages_per_rank",
            f"is {list(per_rank)}, but {schedule} runs the same number on each rank, and no block of consecutive ones; "
            f"write stages_per_rank: {each} and stages: {each * len(per_rank)}, or schedule: gpipe",
        )
    return None
