"""How much of the gradient sync over two replicas shows in a step: ours beside DistributedDataParallel, alternating.

`python tests/bench/ddp.py [--quick]` prints a table and writes tests/bench/results/<date>-ddp.json. One stage of 12
linear layers of 1024, 4 chunks of 64 rows, two replicas over gloo. A side's exposed sync is its step with the sync less
its step without (no_sync); what it is measured against is the same buckets' all-reduces, one after the other, with
nothing to hide behind. Then both sides compiled: ours bucket by bucket, torch's by its own DDPOptimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import stagekit
from stagekit.testing import spawn
from tests.bench.machine import hardware, write_results
from tests.bench.workloads import start

LAYERS, WIDTH, ROWS, CHUNKS = 12, 1024, 64, 4
BUCKET_MIB = 8
GOALS = {"exposed": 0.30, "compiled": 1.0}


def model() -> nn.Module:
    """Return the stage."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean square."""
    return ((output - target) ** 2).mean()


def ours(x: Tensor, target: Tensor, compile: str) -> tuple[Any, Callable[[], None], Callable[[], None]]:
    """Return our run, its step with the sync and its step without."""
    buckets = {"cap": BUCKET_MIB << 20, "first": 1 << 20}
    pipe = stagekit.pipeline(
        model(), args=(x[:ROWS],), loss_fn=loss, stages=1, chunks=CHUNKS, schedule="gpipe", replicas=2, buckets=buckets,
        compile=compile,
    )  # fmt: skip
    run = pipe.deploy()

    def step() -> None:
        run.zero_grad()
        run.step(x, target=target)

    def alone() -> None:
        run.zero_grad()
        with run.no_sync():
            run.step(x, target=target)

    return run, step, alone


def theirs(x: Tensor, target: Tensor, *, compiled: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return DDP's step, all chunks but the last under no_sync, and its step without any sync."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=BUCKET_MIB)
    call: Any = torch.compile(ddp) if compiled else ddp

    def step(synced: bool) -> None:
        ddp.zero_grad()
        for number, (part, wanted) in enumerate(zip(x.split(ROWS), target.split(ROWS), strict=True)):
            with contextlib.nullcontext() if synced and number == CHUNKS - 1 else ddp.no_sync():
                (loss(call(part), wanted) / CHUNKS).backward()

    return lambda: step(True), lambda: step(False)


def pipelining(x: Tensor, target: Tensor) -> Callable[[], None]:
    """Return the step of a one-stage pipeline of torch's around DDP; its GPipe fails an assertion of DDP in the second step."""
    module = DistributedDataParallel(model(), bucket_cap_mb=BUCKET_MIB)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, torch.device("cpu"), group=alone), CHUNKS, loss_fn=loss)

    def step() -> None:
        module.zero_grad()
        schedule.step(x, target=target, losses=[])

    return step


def blocking(sizes: list[int]) -> Callable[[], None]:
    """Return all-reduces of buckets of so many elements, one after the other."""
    buckets = [torch.ones(size) for size in sizes]

    def step() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    return step


def measure(rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step of every side on this rank."""
    start()
    generator = torch.Generator().manual_seed(rank)
    x, target = (torch.randn(CHUNKS * ROWS, WIDTH, generator=generator) for _ in range(2))
    run, synced, alone = ours(x, target, "eager")
    ddp, ddp_alone = theirs(x, target, compiled=False)
    _, compiled, _ = ours(x, target, "inductor")
    ddp_compiled, _ = theirs(x, target, compiled=True)
    sizes = [sum(p.numel() for p in bucket) for bucket in bucket_parameters(run)]
    sides = {
        "ours": synced, "ours, no sync": alone, "DDP": ddp, "DDP, no sync": ddp_alone, "ours again": synced,
        "pipelining + DDP": pipelining(x, target), "blocking": blocking(sizes), "last backward": last_backward(x, target),
        "ours compiled": compiled, "DDP compiled": ddp_compiled,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):  # two to warm up
        for name, side in sides.items():
            dist.barrier()
            began = time.perf_counter()
            side()
            if number > 1:
                times[name].append(time.perf_counter() - began)
    return times


def bucket_parameters(run: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of our buckets, in their order."""
    own = dict(run.named_parameters())
    return [[own[name] for name in bucket.parameters] for bucket in run.plan.model.stages[0].buckets]


def last_backward(x: Tensor, target: Tensor) -> Callable[[], None]:
    """Return the backward of one chunk, with its forward: what there is to hide behind."""
    module = copy.deepcopy(model())
    return lambda: loss(module(x[:ROWS]), target[:ROWS]).backward()  # type: ignore[no-untyped-call]


def rows_of(ranks: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return the rows: minima and medians of the slower rank's times."""
    slowest = {name: [max(pair) for pair in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}
    rows: list[dict[str, Any]] = []
    for title, of in (("min", min), ("median", statistics.median)):
        t = {name: of(values) for name, values in slowest.items()}
        exposed = {side: (t[side] - t[f"{side}, no sync"]) / t["blocking"] for side in ("ours", "DDP")}
        exposed["pipelining + DDP"] = (t["pipelining + DDP"] - t["DDP, no sync"]) / t["blocking"]
        rows.append({"row": "exposed", "of": title, **exposed, "goal": GOALS["exposed"]})
        rows.append(
            {"row": "compiled", "of": title, "ours": t["ours compiled"] / t["DDP compiled"], "goal": GOALS["compiled"]}
        )
        rows.append({"row": "ms", "of": title} | {name: seconds * 1e3 for name, seconds in t.items()})
    for row in rows:
        if "goal" in row and row["of"] == "min":
            row["reached"] = row["ours"] <= row["goal"]
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    titles = {
        "exposed": "exposed sync ÷ the same buckets' blocking sync",
        "compiled": "compiled step ÷ DDP's compiled with its DDPOptimizer",
        "ms": "ms",
    }
    lines = []
    for row in rows:
        values = "   ".join(f"{k} {v:.3f}" for k, v in row.items() if k not in ("row", "of", "goal", "reached"))
        verdict = (
            f"   goal ≤ {row['goal']:g}: {'reached' if row['reached'] else 'NOT reached'}" if "reached" in row else ""
        )
        lines.append(f"{titles[row['row']]}, {row['of']}: {values}{verdict}")
    return "\n".join(lines)


def main() -> int:
    """Run it; the exit status is 0 whatever was reached: every number here is a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = hardware()
    rows = rows_of(spawn(measure, 2, 5 if options.quick else 30, timeout_s=600.0))
    print(report(rows))
    if not options.no_file:
        write_results("ddp", machine, quick=options.quick, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
