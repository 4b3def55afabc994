"""A coordinator as a process of its own, and node daemons that speak the real protocol but start nothing.

A ScriptedNode keeps what a shim would keep (which ranks it started, which facts are not acknowledged), so it survives
a restart of the coordinator the way a real daemon does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pipeapi.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, jobs_pb2_grpc, nodes_pb2, nodes_pb2_grpc, spec_pb2

DEADLINE_S = 20.0
OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from piped.config import CoordinatorConfig
from piped.coordinator.server import run
listen, beat_s, ttl_s = sys.argv[2], *map(float, sys.argv[3:5])
config = CoordinatorConfig(Path(sys.argv[1]), listen=listen, http="127.0.0.1:0", health="127.0.0.1:0", beat_s=beat_s,
                           lease_ttl_s=ttl_s, quotas=tuple(json.loads(sys.argv[5]).items()))
sys.exit(asyncio.run(run(config, accept_rollback=bool(sys.argv[6]))))
"""


async def until(condition: Callable[[], Awaitable[Any] | Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Return the condition's first true value; fail with `what` at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)


@dataclass
class CoordinatorProcess:
    """One state directory, and the process that serves it now."""

    state_dir: Path
    beat_s: float = 0.2
    lease_ttl_s: float = 1.0
    quotas: dict[str, int] = field(default_factory=dict)
    disk: str = ""  # e.g. "2m": the directory is a file system of this size, seen by the process alone; gone with it
    accept_rollback: bool = False
    address: str = "127.0.0.1:0"
    process: asyncio.subprocess.Process | None = None
    endpoints: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> Path:
        """The state directory as the process sees it."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/root{self.state_dir}") if self.disk else self.state_dir

    async def spawn(self) -> asyncio.subprocess.Process:
        mounted: tuple[str, ...] = ()
        if self.disk:
            self.state_dir.mkdir(exist_ok=True)
            mount = f'mount -t tmpfs -o size={self.disk} tmpfs "$0" && exec "$@"'
            mounted = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(self.state_dir))
        rollback = "yes" if self.accept_rollback else ""
        times = [str(each) for each in (self.beat_s, self.lease_ttl_s)]
        with (self.state_dir.parent / f"{self.state_dir.name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(
                    *mounted,
                    sys.executable,
                    "-c",
                    PROGRAM,
                    str(self.state_dir),
                    self.address,
                    *times,
                    json.dumps(self.quotas),
                    rollback,
                ),
                stdout=log,
                stderr=log,
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
            )

    async def start(self) -> None:
        """Start on the address of the earlier process, if there was one, and wait until it serves."""
        self.process = process = await self.spawn()

        def published() -> bool:
            assert process.returncode is None, self.log()
            with contextlib.suppress(FileNotFoundError):
                self.endpoints = json.loads((self.files / "endpoints.json").read_text())
            return self.endpoints.get("pid") == process.pid

        await until(published, "the coordinator serves")
        self.address = self.endpoints["grpc"]

    async def kill(self) -> None:
        """SIGKILL: what is not on disk is gone."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM; return the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    def log(self) -> str:
        return (self.state_dir.parent / f"{self.state_dir.name}.log").read_text()


class Client:
    """The stubs of one coordinator, each call with a deadline."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.jobs = jobs_pb2_grpc.JobServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        self.artifacts = jobs_pb2_grpc.ArtifactServiceStub(self.channel)

    async def submit(self, spec: spec_pb2.JobSpec, request_id: str = "r1") -> jobs_pb2.SubmitResponse:
        request = jobs_pb2.SubmitRequest(request_id=request_id, spec=spec)
        return await self.jobs.Submit(request, timeout=DEADLINE_S, wait_for_ready=True)

    async def job(self, job: str) -> jobs_pb2.Job:
        return (await self.jobs.Get(jobs_pb2.GetRequest(job=job), timeout=DEADLINE_S, wait_for_ready=True)).job

    async def cancel(self, job: str) -> jobs_pb2.Job:
        return (await self.jobs.Cancel(jobs_pb2.CancelRequest(job=job), timeout=DEADLINE_S)).job

    async def until_state(self, job: str, *states: str, deadline_s: float = DEADLINE_S) -> jobs_pb2.Job:
        """Return the job once it is in one of `states`, e.g. "RUNNING"."""
        wanted = [jobs_pb2.JobState.Value(f"JOB_STATE_{each}") for each in states]
        seen: list[jobs_pb2.Job] = []

        async def reached() -> jobs_pb2.Job | None:
            seen[:] = [await self.job(job)]
            return seen[0] if seen[0].state in wanted else None

        try:
            found: jobs_pb2.Job = await until(reached, f"{job} is {' or '.join(states)}", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen[0]}") from None
        return found

    async def nodes(self) -> dict[str, cluster_pb2.Node]:
        reply = await self.cluster.ListNodes(cluster_pb2.ListNodesRequest(), timeout=DEADLINE_S, wait_for_ready=True)
        return {each.node_name: each for each in reply.nodes}


def spec(name: str = "gpt", *, stages: int = 2, replicas: int = 1, **changes: Any) -> spec_pb2.JobSpec:
    """Return a small good spec."""
    message = spec_pb2.JobSpec(
        name=name,
        program="stagekit.examples.gpt:Program",
        pipeline=spec_pb2.PipelineSpec(
            stages=stages, stages_per_rank=1, replicas=replicas, schedule="1f1b", chunks=4, split="balanced"
        ),
        train=spec_pb2.TrainSpec(steps=10, seed=1, log_every=5),
        backend="BACKEND_AUTO",
        resources=spec_pb2.ResourcesSpec(device="auto"),
        grace_s=5,
        start_timeout_s=30,
    )
    message.MergeFrom(spec_pb2.JobSpec(**changes))
    return message


@dataclass
class ScriptedNode:
    """A node that reports every rank as spawned and joined, and then what the test tells it."""

    address: str
    name: str
    num_slots: int = 2
    node_id: str = ""
    host_key: str = ""
    refuses: str = ""  # the message with which it refuses to prepare
    holds: tuple[str, ...] = ()  # of "prepare", "run", "stop": phases that it leaves unanswered
    joins: bool = True
    files: dict[tuple[int, str], bytes] = field(default_factory=dict)  # (rank, kind): what Bulk serves
    cluster_id: str = ""
    welcome: nodes_pb2.Welcome | None = None
    errors: list[grpc.StatusCode] = field(default_factory=list)
    desired: dict[int, nodes_pb2.DesiredAttempt] = field(default_factory=dict)
    desired_rev: int = 0
    started: dict[int, dict[int, str]] = field(default_factory=dict)  # fence: rank: "running" | "ended"
    num_starts: int = 0
    highest_epoch: int = 0
    highest_fence: int = 0
    unacked: dict[tuple[int, int, int], nodes_pb2.Fact] = field(default_factory=dict)
    beats_acked: int = 0
    progress: dict[tuple[int, int], jobs_pb2.Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node_id = self.node_id or f"id-{self.name}"
        self.host_key = self.host_key or f"boot-{self.name}"
        self._wake, self._writing = asyncio.Event(), asyncio.Lock()
        self._is_cut = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedNode]:
        """Keep the node's streams open, reconnecting, while the block runs."""
        tasks = [asyncio.create_task(self._keep(each)) for each in (self._session, self._bulk)]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, fence: int, rank: int | None = None, **fact: Any) -> None:
        """Queue a fact, e.g. report(fence, 0, exited=Exited(code=0))."""
        message = nodes_pb2.Fact(fence=fence, rank=rank, boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME), **fact)
        name = message.WhichOneof("fact")
        kind = nodes_pb2.Fact.DESCRIPTOR.fields_by_name[name].number
        self.unacked[fence, -1 if rank is None else rank, kind] = message
        self._wake.set()

    def end_rank(self, fence: int, rank: int, *, code: int | None = 0, signal_number: int | None = None) -> None:
        """Report the end of a rank; exit code 0 comes with its WorkerDone."""
        self.started[fence][rank] = "ended"
        if code == 0:
            self.report(fence, rank, worker_done=nodes_pb2.WorkerDone(step=10))
        self.report(fence, rank, exited=nodes_pb2.Exited(code=code, signal=signal_number, log_tail=f"tail of {rank}"))

    def finish(self, fence: int) -> None:
        """Report success of every rank that runs here."""
        for rank, state in self.started[fence].items():
            if state == "running":
                self.end_rank(fence, rank)

    def my_ranks(self, attempt: nodes_pb2.DesiredAttempt) -> list[int]:
        return [each.rank for each in attempt.ranks if each.node_id == self.node_id]

    def cut(self) -> None:
        """Let the streams end and stay away."""
        self._is_cut = True
        self._wake.set()

    def heal(self) -> None:
        self._is_cut = False

    async def _keep(self, stream: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
        while True:
            if not self._is_cut:
                async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
                    try:
                        await stream(channel)
                    except grpc.aio.AioRpcError as error:
                        self.errors.append(error.code())
                    except asyncio.InvalidStateError:  # a message for a stream that had ended
                        pass
            await asyncio.sleep(0.05)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call = nodes_pb2_grpc.NodeServiceStub(channel).Session()
        await call.write(nodes_pb2.SessionRequest(hello=self._hello()))
        first = await call.read()
        if first is grpc.aio.EOF:
            self.errors.append(await call.code())
            return
        self.welcome = first.welcome
        self.cluster_id = self.welcome.cluster_id
        if self.welcome.coordinator_epoch > self.highest_epoch:  # revisions are compared within an epoch
            self.highest_epoch, self.desired_rev = self.welcome.coordinator_epoch, 0
        for each in list(self.unacked):  # everything again
            self.unacked[each] = self.unacked[each]
        self._wake.set()
        tasks = [asyncio.create_task(each) for each in (self._read(call), self._beat(call), self._send_facts(call))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    def _hello(self) -> nodes_pb2.Hello:
        return nodes_pb2.Hello(
            cluster_id=self.cluster_id,
            node_id=self.node_id,
            node_name=self.name,
            host_key=self.host_key,
            version="0",
            highest_epoch=self.highest_epoch,
            highest_fence=self.highest_fence,
            data_address="127.0.0.1",
            metrics_address=f"127.0.0.1:{9000 + len(self.name)}",
            slots=[cluster_pb2.Slot(index=each, device=f"cpu:{each}") for each in range(self.num_slots)],
            attempts=[
                nodes_pb2.ObservedAttempt(fence=fence, shim_alive=True, started_ranks=list(ranks))
                for fence, ranks in self.started.items()
            ],
        )

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self.take(message)
        self.errors.append(await call.code())

    def take(self, message: nodes_pb2.SessionResponse) -> None:
        """Do what a message of the coordinator asks for."""
        match message.WhichOneof("message"):
            case "beat_ack":
                self.beats_acked = message.beat_ack.beat_seq
            case "fact_ack":
                for key in message.fact_ack.keys:
                    self.unacked.pop((key.fence, key.rank if key.HasField("rank") else -1, key.kind), None)
            case "desired" if message.desired.desired_rev >= self.desired_rev:
                self.desired_rev = message.desired.desired_rev
                self.desired = {each.fence: each for each in message.desired.attempts}
                for attempt in message.desired.attempts:
                    self._follow(attempt)

    async def _beat(self, call: Any) -> None:
        beat_seq = 0
        assert self.welcome is not None
        while not self._is_cut:
            beat_seq += 1
            beat = nodes_pb2.Beat(beat_seq=beat_seq, desired_rev=self.desired_rev)
            for (fence, rank), progress in self.progress.items():
                beat.progress.add(fence=fence, rank=rank, progress=progress)
            await self._write(call, nodes_pb2.SessionRequest(beat=beat))
            await asyncio.sleep(self.welcome.beat_s / 4)

    async def _send_facts(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.unacked:
                facts = nodes_pb2.FactReport(facts=list(self.unacked.values()))
                await self._write(call, nodes_pb2.SessionRequest(facts=facts))

    async def _write(self, call: Any, message: nodes_pb2.SessionRequest) -> None:
        async with self._writing:  # a stream takes one message at a time
            await call.write(message)

    def _follow(self, attempt: nodes_pb2.DesiredAttempt) -> None:
        """Do what a daemon and its shim would do for the attempt's phase."""
        fence = attempt.fence
        self.highest_fence = max(self.highest_fence, fence)
        match nodes_pb2.Phase.Name(attempt.phase):
            case "PHASE_PREPARE" if "prepare" not in self.holds and fence not in self.started:
                if self.refuses:
                    self.report(fence, prepare_failed=nodes_pb2.PrepareFailed(message=self.refuses))
                else:
                    self.started[fence] = {}
                    self.report(fence, prepared=nodes_pb2.Prepared())
            case "PHASE_RUN" if "run" not in self.holds:
                for rank in self.my_ranks(attempt):
                    if rank not in self.started.setdefault(fence, {}):
                        self._start(fence, rank)
            case "PHASE_STOP" if "stop" not in self.holds:
                for rank, state in self.started.pop(fence, {}).items():
                    if state == "running":
                        self.report(fence, rank, exited=nodes_pb2.Exited(signal=9, by_supervisor=True))
                self.report(fence, attempt_empty=nodes_pb2.AttemptEmpty())

    def _start(self, fence: int, rank: int) -> None:
        self.num_starts += 1
        self.started[fence][rank] = "running"
        self.report(fence, rank, spawned=nodes_pb2.Spawned(pid=1000 + rank, starttime=7))
        if rank == 0:
            self.report(fence, rank, store_listening=nodes_pb2.StoreListening(endpoint="127.0.0.1:4000"))
        if self.joins:
            self.report(fence, rank, joined=nodes_pb2.Joined())

    async def _bulk(self, channel: grpc.aio.Channel) -> None:
        call = nodes_pb2_grpc.NodeServiceStub(channel).Bulk()
        await call.write(nodes_pb2.BulkRequest(hello=nodes_pb2.BulkHello(node_id=self.node_id)))
        while (asked := await call.read()) is not grpc.aio.EOF:
            await call.write(nodes_pb2.BulkRequest(chunk=self._answer(asked)))

    def _answer(self, asked: nodes_pb2.BulkResponse) -> nodes_pb2.BulkChunk:
        chunk = nodes_pb2.BulkChunk(request_id=asked.request_id)
        content = self.files.get((asked.rank, jobs_pb2.RecordKind.Name(asked.kind)))
        if content is None:
            chunk.error = "no such file"
            return chunk
        offset = asked.offset or max(0, len(content) - asked.tail_bytes) * bool(asked.tail_bytes)
        chunk.data = content[offset : offset + min(asked.max_bytes, 1000)]
        chunk.next_offset = offset + len(chunk.data)
        chunk.eof = chunk.next_offset == len(content) and "running" not in str(
            self.started.get(asked.fence, {}).values()
        )
        return chunk
