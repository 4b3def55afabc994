"""Predicted against measured step times: costs fitted to a gpipe run, then every other schedule predicted and measured.

`python tests/bench/predict.py [--quick]` prints predicted ÷ measured per case and writes
tests/bench/results/<date>-predict.json. Stages that sleep need no processor, so that ranks don't disturb each other; the
GPT needs a core per rank. Real processes over gloo. A step's fixed price (its header, the loss that all ranks hear of) is
what the gpipe run took beside its timeline.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stagekit
from stagekit.examples.gpt import GPT
from stagekit.plan.costs import Costs
from stagekit.plan.fit import Timed, fit_costs, timed_of
from stagekit.plan.plan import make_plan
from stagekit.plan.schedules.registry import table_for
from stagekit.plan.transports import Transport
from stagekit.plan.trial import try_schedule
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource, spawn
from tests.bench.machine import hardware, write_results
from tests.bench.sides import TINY, Ours, SleepStage, batch, mean_square
from tests.bench.workloads import byte_loss, over, start

PER_RANK = {"interleaved": 2, "zb-v": 2, "bfs": 2}
SLEEP_GOAL, MODEL_GOAL = 0.05, 0.15


@dataclass(frozen=True)
class Case:
    """Ranks, chunks and schedules; seconds of a stage's F and B for stages that sleep, none for the GPT."""

    ranks: int
    chunks: int
    schedules: tuple[str, ...]
    sleep: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        what = f"sleep {self.sleep[0] * 1e3:g}/{self.sleep[1] * 1e3:g} ms" if self.sleep else "gpt"
        return f"{what}, p={self.ranks}, m={self.chunks}"


ALL = ("1f1b", "interleaved", "zb-h1", "zb-v")
CASES = (Case(4, 8, ALL, (0.010, 0.020)), Case(4, 16, ALL, (0.010, 0.020)), Case(2, 8, ALL))


# ---- in the workers


def measure(rank: int, case: Case, steps: int) -> dict[str, Any]:
    """Run gpipe and every schedule of the case on this rank; return the steps of each, and the shares of I and W."""
    group = start()
    found: dict[str, Any] = {}
    sides: dict[str, Ours] = {}
    with over("gloo"):
        for per_rank in sorted({PER_RANK.get(schedule, 1) for schedule in case.schedules}):
            gpipe = sides[f"gpipe {per_rank}"] = _deployed(case, "gpipe", per_rank, group)
            found[f"halves {per_rank}"] = [_shares(stage) for stage in gpipe.run.plan.model.stages]
        for schedule in case.schedules:
            sides[schedule] = _deployed(case, schedule, PER_RANK.get(schedule, 1), group)
    for number in range(steps + 1):  # the first is the warm-up
        for name, side in sides.items():
            dist.barrier()
            began = time.perf_counter()
            side.step()
            if number:
                taken = time.perf_counter() - began, timed_of(side.run.executor.recorder)
                found.setdefault(name, []).append(taken)
    return found


def _deployed(case: Case, schedule: str, per_rank: int, group: dist.ProcessGroup) -> Ours:
    stages = case.ranks * per_rank
    if case.sleep is not None:
        forward_s, backward_s = (seconds / per_rank for seconds in case.sleep)
        source = ChainSource([SleepStage(forward_s, backward_s) for _ in range(stages)], TINY.width, TINY.rows)
        plan = make_plan(source.spec, schedule=schedule, num_chunks=case.chunks, stages_per_rank=per_rank)
        run = Run(source, plan, RunOptions(mean_square, None, 0), torch.device("cpu"), group)
        return Ours(run, *batch(case.chunks))
    torch.manual_seed(0)
    model: nn.Module = GPT(4, 128, 4, 64, 0.0)
    tokens = torch.randint(0, 256, (2 * case.chunks, 65), generator=torch.Generator().manual_seed(1))
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    pipe = stagekit.pipeline(
        model, args=(x[:2],), loss_fn=byte_loss, stages=stages, chunks=case.chunks, schedule=schedule,
        stages_per_rank=per_rank, split=[f"blocks.{4 // stages * cut}" for cut in range(1, stages)],
    )  # fmt: skip
    return Ours(pipe.deploy(group=group), x, target)


def _shares(stage: Any) -> tuple[float, float]:
    """Return I and W as shares of a full backward, where a stage was measured apart; the first one has no halves."""
    if not stage.index or not stage.backward_s:
        return 1.0, 0.0
    return stage.input_grad_s / stage.backward_s, stage.weight_grad_s / stage.backward_s


# ---- putting it together


def predicted(costs: Costs, case: Case, schedule: str) -> float:
    """Return the makespan that costs foretell."""
    stage_ranks = table_for(schedule, case.ranks * PER_RANK.get(schedule, 1), case.ranks)
    trial = try_schedule(schedule, stage_ranks, case.chunks, costs, transport=Transport.RENDEZVOUS)
    assert trial.timeline is not None
    return trial.timeline.makespan


def rows_of(case: Case, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per schedule: predicted and measured seconds, the slowest rank's wall in the median quiet step."""
    rows = []
    for schedule in case.schedules:
        per_rank = PER_RANK.get(schedule, 1)
        fitted = [[recorded for _, recorded in steps] for steps in _quiet(ranks, f"gpipe {per_rank}")]
        stage_ranks = table_for("gpipe", case.ranks * per_rank, case.ranks)
        costs = fit_costs(fitted, stage_ranks, halves=ranks[0][f"halves {per_rank}"])
        gpipe = try_schedule("gpipe", stage_ranks, case.chunks, costs, transport=Transport.RENDEZVOUS).timeline
        assert gpipe is not None
        fixed = _wall(ranks, f"gpipe {per_rank}") - gpipe.makespan
        told, took = predicted(costs, case, schedule) + fixed, _wall(ranks, schedule)
        goal = SLEEP_GOAL if case.sleep else MODEL_GOAL
        row = {"case": case.name, "schedule": schedule, "predicted_s": told, "measured_s": took, "ratio": told / took}
        rows.append(row | {"fixed_s": fixed, "hop_s": costs.hop, "goal": goal, "reached": abs(told / took - 1) <= goal})
    return rows


def _wall(ranks: Sequence[dict[str, Any]], side: str) -> float:
    return statistics.median(max(wall for wall, _ in steps) for steps in _quiet(ranks, side))


def _quiet(ranks: Sequence[dict[str, Any]], side: str) -> list[Sequence[tuple[float, list[Timed]]]]:
    """Return the fastest third of a side's steps, over all ranks: what else the machine does spoils the others."""
    steps = sorted(zip(*(r[side] for r in ranks), strict=True), key=lambda step: max(wall for wall, _ in step))
    return steps[: max(1, len(steps) // 3)]


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = []
    for row in rows:
        verdict = "reached" if row["reached"] else "NOT reached"
        lines.append(
            f"  {row['case']:<26} {row['schedule']:<12} predicted {row['predicted_s'] * 1e3:8.2f} ms   measured "
            f"{row['measured_s'] * 1e3:8.2f} ms   ratio {row['ratio']:.3f}   goal ± {row['goal']:.0%}: {verdict}"
        )
    return "\n".join(["predicted ÷ measured step, costs fitted to gpipe", *lines])


def main() -> int:
    """Run every case; return 0 if those of sleeping stages are within their goal: a busy machine does not touch them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: under a minute")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    machine, steps = hardware(), 6 if options.quick else 18
    rows = [row for case in CASES for row in rows_of(case, spawn(measure, case.ranks, case, steps, timeout_s=300.0))]
    print(report(rows))
    if not options.no_file:
        write_results("predict", machine, quick=options.quick, rows=rows)
    return 0 if all(row["reached"] for row in rows if row["goal"] == SLEEP_GOAL) else 1


if __name__ == "__main__":
    sys.exit(main())
