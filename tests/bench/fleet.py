"""The control plane at fleet scale: a real coordinator, simulated nodes in a second process, real gRPC between them.

`python tests/bench/fleet.py [--only ROW …] [--no-file]` prints a table and writes tests/bench/results/<date>-fleet.json. What a row
means: `ROWS`; its goal: the last section of control-plane.md, `GOALS`. Connections are plaintext on loopback; both sides and
the nodes share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from pipeapi.v1 import cluster_pb2, jobs_pb2
from tests.bench.machine import hardware, write_results
from tests.integration.coordinator.scripted import Client, CoordinatorProcess, spec

Rows = dict[str, float]
ROWS = {
    "idle_cpu": ("5,000 nodes that beat: share of a core that the coordinator takes", "≤ 0.5"),
    "beat_p99_s": ("… and a beat's way to its acknowledgement, p99, seconds", "< 0.1"),
    "expiries": ("… and leases that ended though nobody was silent", "= 0"),
    "rss_10000_gib": ("10,000 nodes: resident memory of the coordinator, GiB", "≤ 1"),
    "cancelled": ("10,000 unary calls at once: how many were not answered", "= 0"),
    "submits_per_s": ("durable submissions per second, 32 callers", "≥ 500"),
    "submit_p99_s": ("… and one's duration, p99, seconds", "< 0.1"),
    "gang_s": ("2,048 ranks on 256 nodes: from the submission to its answer, with the placement, seconds", "< 0.05"),
    "restart_s": (
        "killed with 1,000 nodes and 10,000 jobs: seconds from the start of the next process until it answers",
        "< 3",
    ),
    "watch_p99_s": ("1,000 watchers of one job: from a change to its message, p99, seconds", "< 0.25"),
}


# ---- processes


class Nodes:
    """The process of simulated nodes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, address: str, count: int, slots: int) -> AsyncIterator[Nodes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.fleet_nodes", address, str(count), str(slots),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        nodes = cls(process)
        try:
            await nodes._read()
            yield nodes
        finally:
            process.kill()
            await process.wait()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 300)
        return dict(json.loads(line))

    async def report(self) -> dict[str, Any]:
        """Return what was seen since the last report."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._read()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_gib(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


@contextlib.asynccontextmanager
async def coordinator() -> AsyncIterator[CoordinatorProcess]:
    """Serve from a fresh state directory with the default beat and lease."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        process = CoordinatorProcess(Path(folder) / "state", beat_s=1.0, lease_ttl_s=4.0)
        await process.start()
        try:
            yield process
        finally:
            assert process.process is not None
            if process.process.returncode is None:
                await process.kill()


def pid_of(process: CoordinatorProcess) -> int:
    assert process.process is not None
    return process.process.pid


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    began_s = time.monotonic()
    await call()
    return time.monotonic() - began_s


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


# ---- rows


async def idle(count: int, seconds: float) -> tuple[dict[str, Any], float, float, int]:
    """Return what `count` nodes saw over `seconds`, the coordinator's share of a core, its memory and lost nodes."""
    async with coordinator() as process, Nodes.running(process.address, count, 8) as nodes:
        await asyncio.sleep(12.0)  # everybody has been told how often to beat
        await nodes.report()
        before_s, began_s = cpu_s(pid_of(process)), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu_s(pid_of(process)) - before_s) / (time.monotonic() - began_s)
        seen = await nodes.report()
        lost = process.log().count("node_lost")
        return seen, share, rss_gib(pid_of(process)), lost


async def large() -> Rows:
    seen, share, _memory, lost = await idle(5000, 30.0)
    print(f"  5,000 nodes: {seen}", file=sys.stderr)
    return {"idle_cpu": share, "beat_p99_s": seen["p99_s"], "expiries": float(lost + sum(seen["ended"].values()))}


async def larger() -> Rows:
    _seen, _share, memory, _lost = await idle(10_000, 10.0)
    return {"rss_10000_gib": memory}


async def burst() -> Rows:
    """10,000 calls at once over one connection."""
    async with coordinator() as process:
        client = Client(process.address)

        async def ask() -> bool:
            try:
                await client.cluster.ListNodes(cluster_pb2.ListNodesRequest(), timeout=60)
            except grpc.aio.AioRpcError:
                return False
            return True

        answered = await asyncio.gather(*(ask() for _ in range(10_000)))
        await client.channel.close()
        return {"cancelled": float(answered.count(False))}


async def submissions(client: Client, count: int, callers: int) -> list[float]:
    """Submit so many jobs that wait for lack of nodes; return how long each took."""
    numbers = itertools.count(1)
    took: list[float] = []

    async def caller() -> None:
        while (number := next(numbers)) <= count:
            took.append(await timed(lambda n=number: client.submit(spec(f"job-{n}"), f"request-{n}")))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return took


async def submits() -> Rows:
    async with coordinator() as process:
        client = Client(process.address)
        await submissions(client, 1, 1)
        began_s, before_s = time.monotonic(), cpu_s(pid_of(process))
        took = await submissions(client, 3000, 32)
        rate = len(took) / (time.monotonic() - began_s)
        print(f"  submit: {(cpu_s(pid_of(process)) - before_s) / len(took) * 1e3:.2f} ms of CPU each", file=sys.stderr)
        await client.channel.close()
        return {"submits_per_s": rate, "submit_p99_s": p99(took)}


async def gang() -> Rows:
    """A job of 2,048 ranks; the answer to a submission comes after its placement is durable."""
    async with coordinator() as process, Nodes.running(process.address, 256, 8):
        client, took = Client(process.address), []
        for number in range(5):
            took.append(await timed(lambda n=number: client.submit(spec(f"gang-{n}", stages=2048), f"g{n}")))
            job = await client.job(f"gang-{number}")
            assert len(job.workers) == 2048, job.pending_reason
            await client.until_state(f"gang-{number}", "RUNNING")
            await client.cancel(f"gang-{number}")
            await client.until_state(f"gang-{number}", "CANCELLED")
        await client.channel.close()
        print(f"  gang: {took}", file=sys.stderr)
        return {"gang_s": statistics.median(took)}


async def restart() -> Rows:
    async with coordinator() as process, Nodes.running(process.address, 1000, 8) as nodes:
        client = Client(process.address)
        for number in range(200):
            await client.submit(spec(f"live-{number}", stages=4), f"live-{number}")
        await client.until_state("live-199", "RUNNING")
        await submissions(client, 9800, 64)
        await nodes.report()
        await process.kill()
        began_s = time.monotonic()
        await process.start()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                found = await client.jobs.List(jobs_pb2.ListRequest(), timeout=10)
                break
        took = time.monotonic() - began_s
        await asyncio.sleep(8.0)
        states = {jobs_pb2.JobState.Name((await client.job(f"live-{number}")).state) for number in range(200)}
        assert len(found.jobs) >= 10_000 and states == {"JOB_STATE_RUNNING"}, states
        await client.channel.close()
        return {"restart_s": took}


async def watchers() -> Rows:
    async with coordinator() as process:
        client = Client(process.address)
        await client.submit(spec("seen"), "seen")
        heard: list[float] = []

        async def watch() -> None:
            call = client.jobs.Watch(jobs_pb2.WatchRequest(job="seen"))
            async for message in call:
                if message.job.state == jobs_pb2.JOB_STATE_CANCELLED:
                    heard.append(time.monotonic())
                else:
                    began.release()

        began = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(watch()) for _ in range(1000)]
        for _ in tasks:
            await began.acquire()
        await asyncio.sleep(1.0)
        at_s = time.monotonic()
        await client.cancel("seen")
        await asyncio.gather(*tasks)
        await client.channel.close()
        return {"watch_p99_s": p99([each - at_s for each in heard])}


MEASURES = (large, larger, burst, submits, gang, restart, watchers)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[each.__name__ for each in MEASURES], default=[])
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    machine, rows = hardware(), {}
    for measure in MEASURES:
        if not options.only or measure.__name__ in options.only:
            found = asyncio.run(measure())
            for name, value in found.items():
                print(f"{ROWS[name][0]}: {value:.4g} (goal {ROWS[name][1]})", flush=True)
            rows |= found
    if not options.only and not options.no_file:
        write_results("fleet", machine, quick=False, rows=rows, goals={name: goal for name, (_, goal) in ROWS.items()})
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
