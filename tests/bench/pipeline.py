"""Our pipeline runtime beside torch.distributed.pipelining, in the same processes, in alternating blocks.

`python tests/bench/pipeline.py [--quick] [--only ROW …]` prints a table and writes
tests/bench/results/<date>-pipeline.json. Absolute times depend on the machine and on what else runs there; the ratio of
two blocks that ran next to each other does less so, and the A/A rows show by how much two blocks of the same side
differ. What a row means: `ROWS`; its goal: `GOALS`. What runs: tests/bench/workloads.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stagekit.testing import spawn
from tests.bench.machine import hardware, write_results
from tests.bench.sides import Shape
from tests.bench.workloads import TRANSPORTS, Sleep, gpt, sleepy, tiny

TINY_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-v", "zb-auto")
TINY_CHUNKS = 32
SLEEPS = {
    "sleep": Sleep(0.010, 0.020, 4, 8),
    "short sleep": Sleep(0.002, 0.004, 4, 16, Shape(64, 1024)),
    "exposed": Sleep(0.020, 0.020, 2, 8, Shape(2048, 1024)),
}
SLEEP_SCHEDULES = {
    "sleep": ("1f1b", "gpipe"), "short sleep": ("1f1b", "gpipe"), "exposed": ("1f1b", "gpipe", "zb-v"),
}  # fmt: skip
GPT_OURS, GPT_TORCH = ("1f1b", "interleaved", "zb-h1", "zb-v"), ("1f1b", "interleaved")
ROWS = {
    "calls": ("Python and C calls per compute action above the bare stage, p=2, m=32, mean over ranks", "calls"),
    "cpu": ("main-thread CPU per compute action above the bare stage, metrics on, mean over ranks", "µs"),
    "wall": ("tiny stage, p=2, m=32, metrics on: step ÷ torch's (A/A: a second block of the same side)", "ratio"),
    "sleep": ("sleep 10 ms F / 20 ms B, p=4, m=8: step ÷ ideal of the bare stage's measured times", "ratio"),
    "short sleep": ("sleep 2 ms F / 4 ms B, 256 KiB messages, p=4, m=16: step ÷ ideal", "ratio"),
    "exposed": ("sleep 20 ms F / 20 ms B, 8 MiB messages, p=2, m=8: step − ideal", "ms"),
    "gpt": ("GPT, 4 layers, 256 wide, 128 long, 16 rows in 8 chunks, 2 ranks: one process' step ÷ this", "speed-up"),
    "watched": ("the same GPT, 1f1b over gloo, metrics and records on ÷ off: CPU of a step", "ratio"),
    "equal": ("gradients equal torch.distributed.pipelining's bit for bit, every rank, both transports", ""),
}
AT_MOST: dict[tuple[str, str, str], float] = {  # (row, schedule, transport) → goal of the minimum
    ("wall", "1f1b", "gloo"): 0.75, ("wall", "gpipe", "gloo"): 0.35, ("wall", "interleaved", "gloo"): 0.35,
    ("wall", "zb-v", "gloo"): 0.4, ("wall", "1f1b", "shm"): 0.25, ("wall", "gpipe", "shm"): 0.12,
    ("wall", "interleaved", "shm"): 0.07, ("wall", "zb-v", "shm"): 0.08,
    **{("calls", s, t): 5.0 for s in ("1f1b", "gpipe", "interleaved") for t in TRANSPORTS},
    **{("calls", s, t): 15.0 for s in ("zb-v", "zb-auto") for t in TRANSPORTS},
    **{("cpu", s, t): goal for s in TINY_SCHEDULES for t, goal in (("gloo", 45.0), ("shm", 15.0))},
    **{("sleep", s, t): goal for s in SLEEP_SCHEDULES["sleep"] for t, goal in (("gloo", 1.02), ("shm", 1.01))},
    **{("short sleep", s, t): goal for s in SLEEP_SCHEDULES["sleep"] for t, goal in (("gloo", 1.25), ("shm", 1.08))},
    ("exposed", "1f1b", "gloo"): 30.0, ("exposed", "gpipe", "gloo"): 45.0, ("exposed", "zb-v", "gloo"): 55.0,
    ("exposed", "1f1b", "shm"): 15.0, ("exposed", "gpipe", "shm"): 15.0, ("exposed", "zb-v", "shm"): 10.0,
    ("watched", "1f1b", "gloo"): 1.01,
}  # fmt: skip
MEDIAN_CPU = {"gloo": 60.0}
GPT_AT_LEAST, GPT_OVER_TORCH = {"gloo": 1.75, "shm": 1.85}, 1.07
Row = dict[str, Any]
Combine = Callable[[Sequence[float]], float]
MIN_AND_MEDIAN: tuple[tuple[str, Combine], ...] = (("min", min), ("median", statistics.median))


def row(name: str, schedule: str, transport: str, of: str, ours: float, theirs: float, goal: float | None) -> Row:
    """Return one row; `goal`: at most."""
    made = {"row": name, "schedule": schedule, "transport": transport, "of": of, "ours": ours, "torch": theirs}
    return made | ({"goal": goal, "reached": ours <= goal} if goal is not None else {})


def goal_of(name: str, schedule: str, transport: str, of: str) -> float | None:
    """Return the goal of a row: of its minimum, and for CPU times of the median, too."""
    if of == "median":
        return MEDIAN_CPU.get(transport) if name == "cpu" else None
    return AT_MOST.get((name, schedule, transport))


def over_ranks(ranks: list[Any], side: str, what: int, combine: Combine) -> list[float]:
    """Return, per block, the ranks' values combined."""
    return [combine(values) for values in zip(*([b[what] for b in r["blocks"][side]] for r in ranks), strict=True)]


def tiny_rows(ranks: list[Any], schedule: str) -> list[Row]:
    """Return the rows that `tiny` gives."""
    sides, actions, rows = ranks[0]["blocks"], ranks[0]["actions"], []
    wall = {side: over_ranks(ranks, side, 0, max) for side in sides}
    cpu = {side: over_ranks(ranks, side, 1, statistics.mean) for side in sides}
    calls = {side: statistics.mean(r["calls"][side] for r in ranks) for side in ranks[0]["calls"]}
    for t in TRANSPORTS:
        rows.append(
            row("calls", schedule, t, "", calls[t], calls["torch"], goal_of("calls", schedule, t, ""))
            | {"per_rank": [r["calls"][t] for r in ranks]}
        )
        for title, of in MIN_AND_MEDIAN:
            ours, theirs = of(wall[t]), of(wall["torch"])
            made = row("wall", schedule, t, title, ours / theirs, 1.0, goal_of("wall", schedule, t, title))
            rows.append(made | {"ours_ms": ours * 1e3, "torch_ms": theirs * 1e3})
            ours, theirs = (
                1e6 * (of(cpu[side]) - of(cpu[f"{kind} bare"])) / actions
                for side, kind in ((t, "ours"), ("torch", "torch"))
            )
            rows.append(row("cpu", schedule, t, title, ours, theirs, goal_of("cpu", schedule, t, title)))
    for title, of in MIN_AND_MEDIAN:
        again = [of(wall[f"{side} again"]) / of(wall[side]) for side in ("gloo", "torch")]
        rows.append(row("wall", schedule, "A/A", title, *again, None))
    return rows


def sleepy_rows(ranks: list[Any], name: str, schedule: str) -> list[Row]:
    """Return the rows that `sleepy` gives: a step over the ideal, or beyond it in ms."""
    rounds = list(zip(*(r["rows"] for r in ranks), strict=True))
    found = {}
    for side in (*TRANSPORTS, "torch"):
        pairs = [(max(each[side] for each in every), every[0]["ideal"]) for every in rounds]
        found[side] = [1e3 * (step - ideal) if name == "exposed" else step / ideal for step, ideal in pairs]
    return [
        row(name, schedule, t, title, of(found[t]), of(found["torch"]), goal_of(name, schedule, t, title))
        for t in TRANSPORTS
        for title, of in MIN_AND_MEDIAN
    ]


def gpt_rows(ranks: list[Any]) -> list[Row]:
    """Return the rows that `gpt` gives; a schedule's torch column is torch's best."""
    wall = {
        side: [max(b[0] for b in blocks) for blocks in zip(*(r[side] for r in ranks), strict=True)] for side in ranks[0]
    }
    rows = []
    for title, of in MIN_AND_MEDIAN:
        one = of(wall["one process"])
        best = max(one / of(wall[f"torch {schedule}"]) for schedule in GPT_TORCH)
        for t in TRANSPORTS:
            speeds = {schedule: one / of(wall[f"{t} {schedule}"]) for schedule in GPT_OURS}
            for schedule, speed in speeds.items():
                made = row("gpt", schedule, t, title, speed, best, None)
                if of is min and speed == max(speeds.values()):
                    goal = max(GPT_AT_LEAST[t], GPT_OVER_TORCH * best)
                    made |= {"goal": goal, "reached": speed >= goal}
                rows.append(made)
    cpu = {side: [b[1] for b in ranks[-1][side]] for side in ("watched", f"gloo {GPT_OURS[0]}")}
    for title, of in MIN_AND_MEDIAN:
        ratio = of(cpu["watched"]) / of(cpu[f"gloo {GPT_OURS[0]}"])
        rows.append(row("watched", "1f1b", "gloo", title, ratio, 1.0, goal_of("watched", "1f1b", "gloo", title)))
    return rows


def report(rows: list[Row]) -> str:
    """Return the rows as a table."""
    lines = []
    for name, (title, unit) in ROWS.items():
        mine = [each for each in rows if each["row"] == name]
        if mine:
            lines.append(f"\n{title}" + (f" [{unit}]" if unit else ""))
        for each in mine:
            if name == "equal":
                lines.append(f"  {each['schedule']:<20} {'yes' if each['reached'] else 'NO'}")
                continue
            sign = "≥" if name == "gpt" else "≤"
            verdict = (
                f"goal {sign} {each['goal']:.3g}: {'reached' if each['reached'] else 'NOT reached'}"
                if "goal" in each
                else ""
            )
            lines.append(
                f"  {each['schedule']:<12} {each['transport']:<5} {each['of']:<7} ours {each['ours']:8.3f}   "
                f"torch {each['torch']:8.3f}   {verdict}"
            )
    return "\n".join(lines)


def measure(only: Sequence[str], *, quick: bool) -> list[Row]:
    """Run the workloads that the rows `only` need (none: all) and return their rows."""
    wanted = set(only or ROWS)
    rounds, steps, sleeps = (4, 4, 2) if quick else (20, 8, 12)
    rows: list[Row] = []
    same: dict[str, bool] = {}
    if wanted & {"calls", "cpu", "wall", "equal"}:
        for schedule in TINY_SCHEDULES:
            ranks = spawn(tiny, 2, schedule, TINY_CHUNKS, rounds, steps, timeout_s=300.0)
            rows += tiny_rows(ranks, schedule)
            same[f"{schedule}, p=2"] = all(rank["equal"] for rank in ranks)
    for name, case in SLEEPS.items():
        for schedule in SLEEP_SCHEDULES[name] if name in wanted else ():
            ranks = spawn(sleepy, case.ranks, schedule, case, sleeps, timeout_s=300.0)
            rows += sleepy_rows(ranks, name, schedule)
            same[f"{schedule}, {name}"] = all(rank["equal"] for rank in ranks)
    if wanted & {"gpt", "watched"}:
        rows += gpt_rows(spawn(gpt, 2, GPT_OURS, GPT_TORCH, 3 if quick else 12, timeout_s=600.0))
    rows += [{"row": "equal", "schedule": schedule, "reached": reached} for schedule, reached in same.items()]
    return [each for each in rows if each["row"] in wanted]


def main() -> int:
    """Run every row; return 0 if the deterministic ones reached their goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks: under two minutes")
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[], help="these rows only; implies --no-file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = hardware()
    rows = measure(options.only, quick=options.quick)
    print(report(rows))
    if not options.no_file and not options.only:
        write_results("pipeline", machine, quick=options.quick, rows=rows)
    return 0 if all(each.get("reached", True) for each in rows if each["row"] in ("calls", "equal")) else 1


if __name__ == "__main__":
    sys.exit(main())
