"""The schedules of a job file, and what each asks of the numbers beside it.

The orders themselves are stagekit's, which a client need not have; a test holds this, the coordinator's rules and stagekit's
together. Called by pipeapi.jobspec.
"""

from __future__ import annotations

ONE_PER_RANK = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2")
FORWARD = "forward"  # no backward: for programs whose mode is "forward"
V_SHAPED = ("zb-v", "v-half", "dualpipe-v")  # two per rank: up the ranks and down again
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "eager-1f1b", "dualpipe-v", "forward",
    "zb-auto",
)  # fmt: skip


def misfit(schedule: str, stages: int, stages_per_rank: int, chunks: int) -> tuple[str, str] | None:
    """Return the field that doesn't suit `schedule` and what would do; None where all fit. The counts are at least 1 and
    `stages_per_rank` divides `stages`.
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
    if schedule == "dualpipe-v" and chunks < 2 * ranks:
        return (
            "chunks",
            f"is {chunks}, but dualpipe-v on {ranks} ranks needs at least {2 * ranks}; write chunks: {2 * ranks}, or "
            "schedule: zb-v",
        )
    return None
