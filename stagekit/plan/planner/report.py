"""A ranking as plain data, and where the time of a plan goes. Pure; `pipectl plan` prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stagekit.plan.actions import Op
from stagekit.plan.forecast import forecast
from stagekit.plan.planner.candidates import Outcome
from stagekit.plan.planner.search import Ranking


def as_document(ranking: Ranking) -> dict[str, Any]:
    """Return a ranking as JSON's values, seconds and bytes: the first of `plans` is the one that runs."""
    refused: dict[str, list[str]] = {}
    for each in ranking.refused:
        refused.setdefault(each.refusal, []).append(str(each.candidate))
    return {
        "bound_s": ranking.bound_s,
        "plans": [_row(each, ranking) for each in ranking.best],
        "refused": [{"plans": names, "reason": reason} for reason, names in refused.items()],
        "limited_by": where_time_goes(ranking.winner),
    }


def _row(outcome: Outcome, ranking: Ranking) -> dict[str, Any]:
    told = outcome.candidate
    return {
        "schedule": told.schedule,
        "stages_per_rank": told.stages_per_rank,
        "chunks": told.chunks,
        "memory_limit": told.memory_limit,
        "step_s": outcome.step_s,
        "bubble": outcome.bubble,
        "rank_bytes": list(outcome.rank_bytes),
        "gap": ranking.gap(outcome),
    }


def where_time_goes(outcome: Outcome) -> dict[str, float]:
    """Return the parts of a plan's step, in seconds: the mean work of a rank, what the fullest has more, what hops add,
    and the rest, which is filling and draining the pipeline.
    """
    costs = outcome.costs
    assert costs is not None
    times = {Op.F: costs.forward, Op.B: costs.full_backward, Op.I: costs.input_grad, Op.W: costs.weight_grad}
    work = [sum(times[action.op][action.stage] for action in row) for row in outcome.orders]
    hopless = forecast(outcome.orders, outcome.stage_ranks, replace(costs, hop=0.0)).makespan
    mean = sum(work) / len(work)
    return {
        "work_s": mean,
        "uneven_s": max(work) - mean,
        "transfers_s": outcome.step_s - hopless,
        "fill_and_drain_s": hopless - max(work),
    }
