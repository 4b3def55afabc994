"""Our pipeline runtime beside torch.distributed.pipelining, in the same processes, in alternating blocks.

`python tests/bench/pipeline.py [--quick]` prints a table and writes tests/bench/results/<date>-pipeline.json. Absolute
times depend on the machine and on what else runs there; the ratio of two blocks that ran next to each other does
less so, and the A/A rows show by how much two blocks of the same side differ. What a row means, and its goal:
`ROWS` below. The sides are in tests/bench/sides.py.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piped.worker.link import Link
from piped.worker.observe import Observer
from stagekit.plan.lowering import routes_of
from stagekit.plan.timeline import simulate
from stagekit.run.lane import StepResult
from stagekit.testing import spawn
from tests.bench.machine import hardware, write_results
from tests.bench.sides import Ours, SleepStage, Torch, count_calls, tiny_stages

SCHEDULES = ("1f1b", "gpipe")
TINY_CHUNKS, SLEEP_CHUNKS = 32, 8
ROWS = {
    "wall": ("tiny stage, p=2, m=32, metrics on: step ÷ torch's (A/A: a second block of the same side)", "ratio"),
    "calls": ("Python and C calls per compute action above the bare stage, p=2, m=32, mean over ranks", "calls"),
    "cpu": ("main-thread CPU per compute action above the bare stage, metrics on, mean over ranks", "µs"),
    "sleep": ("sleep 10 ms F / 20 ms B, p=4, m=8: step ÷ ideal of the bare stage's measured times", "ratio"),
    "equal": ("gradients equal torch.distributed.pipelining's bit for bit, every rank of p=2 and p=4", ""),
}
GOALS = {
    ("wall", "1f1b"): 0.75, ("wall", "gpipe"): 0.35, ("calls", ""): 5.0, ("cpu", "min"): 45.0, ("cpu", "median"): 60.0,
    ("sleep", ""): 1.02,
}  # fmt: skip


# ---- in the workers


def _timed(step: Any, steps: int) -> tuple[float, float]:
    """Return wall and main-thread CPU seconds per step of one block."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps, (time.thread_time() - cpu) / steps


def _observe(ours: Ours, folder: Path) -> None:
    """Observe every step as a worker does, over a real link whose other end reads and drops."""
    here, there = socket.socketpair()

    def drain() -> None:
        while there.recv(65536):
            pass

    threading.Thread(target=drain, daemon=True).start()
    observer = Observer(Link(here.detach()), ours.run, folder, steps=-1, expected={"bubble": 0.0, "step_s": 0.0})

    def after_step(result: StepResult, step_s: float) -> None:
        observer.after_step(ours.run.step_number, result, step_s=step_s, optimizer_s=0.0)

    ours.after_step = after_step


def _gradients_equal(ours: Ours, torchs: Torch) -> bool:
    ours.step()
    torchs.step()
    mine, theirs = ours.gradients(), torchs.gradients()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def tiny(rank: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure the tiny stage on this rank: per schedule the walls and CPU times of each block, calls, equality."""
    result: dict[str, Any] = {}
    for schedule in SCHEDULES:
        stages, group = tiny_stages(2), dist.group.WORLD
        assert group is not None
        ours, torchs = Ours(stages, schedule, TINY_CHUNKS, group), Torch(stages, schedule, TINY_CHUNKS, group)
        equal = _gradients_equal(ours, torchs)
        for _ in range(2):
            for side in (ours, torchs, ours.bare, torchs.bare):
                side.step()
        actions = 2 * TINY_CHUNKS
        calls = {
            name: (count_calls(side.step) - count_calls(side.bare.step)) / actions
            for name, side in (("ours", ours), ("torch", torchs))
        }
        blocks: dict[str, list[tuple[float, float]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            _observe(ours, Path(folder))
            sides = {"ours": ours, "torch": torchs, "ours again": ours, "torch again": torchs}
            for _ in range(rounds):
                for name, side in sides.items():
                    blocks.setdefault(name, []).append(_timed(side.step, steps))
                for name in ("ours", "torch"):
                    blocks.setdefault(f"{name} bare", []).append(_timed(sides[name].bare.step, steps))
        result[schedule] = {"blocks": blocks, "calls": calls, "equal": equal}
    return result


def sleepy(rank: int, rounds: int) -> dict[str, Any]:
    """Measure stages that sleep: per schedule the steps of both sides, and the ideal of each round."""
    result: dict[str, Any] = {}
    for schedule in SCHEDULES:
        stages, group = [SleepStage(0.010, 0.020) for _ in range(4)], dist.group.WORLD
        assert group is not None
        ours, torchs = Ours(stages, schedule, SLEEP_CHUNKS, group), Torch(stages, schedule, SLEEP_CHUNKS, group)
        equal = _gradients_equal(ours, torchs)
        rows = []
        for _ in range(rounds):
            dist.barrier()
            costs: list[Any] = [None] * 4
            dist.all_gather_object(costs, ours.bare.measure())
            timeline = simulate(
                ours.plan.actions, ours.plan.extension, ours.plan.stage_ranks, routes_of(ours.plan.model),
                forward=[f for f, _ in costs], backward=[b for _, b in costs],
            )  # fmt: skip
            rows.append((_timed(ours.step, 1)[0], _timed(torchs.step, 1)[0], timeline.makespan))
        result[schedule] = {"rows": rows, "equal": equal}
    return result


# ---- putting it together


def _over_ranks(ranks: list[Any], schedule: str, side: str, what: int, combine: Any) -> list[float]:
    """Return, per block, the ranks' values combined."""
    return [
        combine(values) for values in zip(*([b[what] for b in r[schedule]["blocks"][side]] for r in ranks), strict=True)
    ]


def tiny_rows(ranks: list[Any], schedule: str) -> list[dict[str, Any]]:
    """Return the rows that `tiny` gives."""
    wall = {side: _over_ranks(ranks, schedule, side, 0, max) for side in ranks[0][schedule]["blocks"]}
    cpu = {side: _over_ranks(ranks, schedule, side, 1, statistics.mean) for side in ranks[0][schedule]["blocks"]}
    goal = GOALS["wall", schedule]
    rows = []
    for title, of in (("min", min), ("median", statistics.median)):
        ours, theirs = of(wall["ours"]), of(wall["torch"])
        rows.append(_row("wall", schedule, title, ours / theirs, 1.0, goal if of is min else None))
        rows[-1] |= {"ours_ms": ours * 1e3, "torch_ms": theirs * 1e3}
        again = [of(wall[f"{side} again"]) / of(wall[side]) for side in ("ours", "torch")]
        rows.append(_row("wall", schedule, f"A/A {title}", again[0], again[1], None))
    calls = {side: [r[schedule]["calls"][side] for r in ranks] for side in ("ours", "torch")}
    rows.append(
        _row("calls", schedule, "", statistics.mean(calls["ours"]), statistics.mean(calls["torch"]), GOALS["calls", ""])
    )
    rows[-1]["per_rank"] = calls
    for title, of in (("min", min), ("median", statistics.median)):
        mine, theirs = (
            1e6 * (of(cpu[side]) - of(cpu[f"{side} bare"])) / (2 * TINY_CHUNKS) for side in ("ours", "torch")
        )
        rows.append(_row("cpu", schedule, title, mine, theirs, GOALS["cpu", title]))
    return rows


def sleepy_rows(ranks: list[Any], schedule: str) -> list[dict[str, Any]]:
    """Return the rows that `sleepy` gives."""
    rounds = list(zip(*(r[schedule]["rows"] for r in ranks), strict=True))
    ratios = [[max(row[side] for row in rows) / rows[0][2] for rows in rounds] for side in (0, 1)]
    return [
        _row("sleep", schedule, title, of(ratios[0]), of(ratios[1]), GOALS["sleep", ""] if of is min else None)
        for title, of in (("min", min), ("median", statistics.median))
    ]  # fmt: skip


def _row(name: str, schedule: str, of: str, ours: float, theirs: float, goal: float | None) -> dict[str, Any]:
    row = {"row": name, "schedule": schedule, "of": of, "ours": ours, "torch": theirs, "unit": ROWS[name][1]}
    return row | ({"goal": goal, "reached": ours <= goal} if goal is not None else {})


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = []
    for name, (title, unit) in ROWS.items():
        lines.append(f"\n{title}" + (f" [{unit}]" if unit else ""))
        for row in (row for row in rows if row["row"] == name):
            if name == "equal":
                lines.append(f"  {row['schedule']:<6} {'yes' if row['reached'] else 'NO'}")
                continue
            goal = f"goal ≤ {row['goal']:g}: {'reached' if row['reached'] else 'NOT reached'}" if "goal" in row else ""
            lines.append(
                f"  {row['schedule']:<6} {row['of']:<12} ours {row['ours']:8.3f}   torch {row['torch']:8.3f}   {goal}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run every row; return 0 if the deterministic ones reached their goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks: under 40 s")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = hardware()
    rounds, steps, sleeps = (4, 4, 2) if options.quick else (20, 8, 12)
    pairs, fours = spawn(tiny, 2, rounds, steps, timeout_s=300.0), spawn(sleepy, 4, sleeps, timeout_s=300.0)
    rows = [row for schedule in SCHEDULES for row in tiny_rows(pairs, schedule) + sleepy_rows(fours, schedule)]
    for schedule in SCHEDULES:
        equal = all(rank[schedule]["equal"] for rank in (*pairs, *fours))
        rows.append({"row": "equal", "schedule": schedule, "reached": equal})
    print(report(rows))
    if not options.no_file:
        write_results("pipeline", machine, quick=options.quick, rows=rows)
    return 0 if all(row.get("reached", True) for row in rows if row["row"] in ("calls", "equal")) else 1


if __name__ == "__main__":
    sys.exit(main())
