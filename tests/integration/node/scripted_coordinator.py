"""A coordinator that does what a test says: a real gRPC server with the session protocol and nothing behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pipeapi.v1 import cluster_pb2, jobs_pb2, jobs_pb2_grpc, nodes_pb2, nodes_pb2_grpc, spec_pb2

DEADLINE_S = 20.0
KIND = {field.number: field.name for field in nodes_pb2.Fact.DESCRIPTOR.fields}


class Coordinator(nodes_pb2_grpc.NodeServiceServicer, jobs_pb2_grpc.ArtifactServiceServicer):
    """Registers any node, sends `desired`, acknowledges facts while `acknowledges`."""

    def __init__(self) -> None:
        self.cluster_id, self.epoch, self.revision = "c1", 1, 0
        self.acknowledges = True
        self.acknowledges_beats, self.lease_ttl_s = True, 4.0
        self.hellos: list[nodes_pb2.Hello] = []
        self.beats: list[nodes_pb2.Beat] = []
        self.facts: dict[tuple[int, int | None, str], nodes_pb2.Fact] = {}
        self.order: list[tuple[int, int | None, str]] = []  # every fact as it came, repetitions included
        self.artifacts: dict[str, bytes] = {}
        self.withholds_artifacts = False  # answers no download
        self.chunks: dict[int, nodes_pb2.BulkChunk] = {}
        self._attempts: dict[int, nodes_pb2.DesiredAttempt] = {}
        self._sessions: list[asyncio.Queue[nodes_pb2.SessionResponse]] = []
        self._asks: asyncio.Queue[nodes_pb2.BulkResponse] = asyncio.Queue()
        self._num_asks = 0
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        nodes_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        jobs_pb2_grpc.add_ArtifactServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    def want(self, *attempts: nodes_pb2.DesiredAttempt) -> None:
        """Make `attempts` all that is desired."""
        self._attempts = {attempt.fence: attempt for attempt in attempts}
        self.revision += 1
        for queue in self._sessions:
            queue.put_nowait(self._desired())

    async def heard(self, fence: int, rank: int | None, kind: str) -> Any:
        """Return the fact once it came."""
        await self.until(lambda: (fence, rank, kind) in self.facts, f"{kind} of rank {rank}, fence {fence}")
        return getattr(self.facts[fence, rank, kind], kind)

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if value := condition():
                return value
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within {DEADLINE_S} s: {what}; facts: {list(self.facts)}")

    async def ask(self, **fields: Any) -> nodes_pb2.BulkChunk:
        """Ask the node for a piece of a file and return its answer."""
        self._num_asks += 1
        number = self._num_asks
        self._asks.put_nowait(nodes_pb2.BulkResponse(request_id=number, **fields))
        await self.until(lambda: number in self.chunks, f"answer to {fields}")
        return self.chunks[number]

    def _desired(self) -> nodes_pb2.SessionResponse:
        state = nodes_pb2.DesiredState(desired_rev=self.revision, attempts=list(self._attempts.values()))
        return nodes_pb2.SessionResponse(desired=state)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[nodes_pb2.SessionResponse]:
        out: asyncio.Queue[nodes_pb2.SessionResponse] = asyncio.Queue()
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        welcome = nodes_pb2.Welcome(
            cluster_id=self.cluster_id,
            coordinator_epoch=self.epoch,
            incarnation=1,
            beat_s=0.1,
            lease_ttl_s=self.lease_ttl_s,
        )
        out.put_nowait(nodes_pb2.SessionResponse(welcome=welcome))
        out.put_nowait(self._desired())
        self._sessions.append(out)
        listener = asyncio.create_task(self._listen(request_iterator, out))
        try:
            while True:
                yield await out.get()
        finally:
            self._sessions.remove(out)
            listener.cancel()

    async def _listen(self, requests: Any, out: asyncio.Queue[nodes_pb2.SessionResponse]) -> None:
        async for request in requests:
            if request.HasField("beat"):
                self.beats.append(request.beat)
                ack = nodes_pb2.BeatAck(beat_seq=request.beat.beat_seq)
                if self.acknowledges_beats:
                    out.put_nowait(nodes_pb2.SessionResponse(beat_ack=ack))
            else:
                self._take(request.facts, out)

    def _take(self, report: nodes_pb2.FactReport, out: asyncio.Queue[nodes_pb2.SessionResponse]) -> None:
        keys = []
        for fact in report.facts:
            kind = fact.WhichOneof("fact")
            rank = fact.rank if fact.HasField("rank") else None
            self.order.append((fact.fence, rank, kind))
            self.facts.setdefault((fact.fence, rank, kind), fact)
            number = nodes_pb2.Fact.DESCRIPTOR.fields_by_name[kind].number
            keys.append(nodes_pb2.FactKey(fence=fact.fence, rank=rank, kind=number))
        if self.acknowledges:
            out.put_nowait(nodes_pb2.SessionResponse(fact_ack=nodes_pb2.FactAck(keys=keys)))

    async def Bulk(self, request_iterator: Any, context: Any) -> AsyncIterator[nodes_pb2.BulkResponse]:
        await anext(request_iterator)

        async def listen() -> None:
            async for request in request_iterator:
                self.chunks[request.chunk.request_id] = request.chunk

        listener = asyncio.create_task(listen())
        try:
            while True:
                yield await self._asks.get()
        finally:
            listener.cancel()

    async def Download(self, request: Any, context: Any) -> AsyncIterator[jobs_pb2.DownloadResponse]:
        if self.withholds_artifacts:
            await asyncio.Event().wait()
        data = self.artifacts.get(request.sha256)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact")
        for begin in range(0, len(data or b""), 1 << 18):
            yield jobs_pb2.DownloadResponse(data=(data or b"")[begin : begin + (1 << 18)])


def attempt(
    phase: int, node_id: str, act: str, *, python: str, fence: int = 7, num_ranks: int = 1, **fields: Any
) -> nodes_pb2.DesiredAttempt:
    """Return an attempt with all its ranks on one node, one stage each; `act` is what the scripted workers do."""
    spec = spec_pb2.JobSpec(
        name="job",
        program="m:P",
        params={"act": spec_pb2.ParamValue(string_value=act)},
        pipeline=spec_pb2.PipelineSpec(
            stages=num_ranks, stages_per_rank=1, replicas=1, schedule="1f1b", chunks=4, split="balanced"
        ),
        python=python,
        source_sha256=fields.pop("source_sha256", ""),
        env={"TOKEN": "secret"},
        redacted_env=["TOKEN"],
    )
    ranks = [
        nodes_pb2.RankPlacement(
            rank=rank,
            stages=[rank],
            node_id=node_id,
            node_name="n1",
            slot=cluster_pb2.Slot(index=rank, device=f"cpu:{rank}"),
        )
        for rank in range(num_ranks)
    ]
    return nodes_pb2.DesiredAttempt(
        job_id="j1",
        attempt=1,
        fence=fence,
        phase=phase,
        spec=spec,
        ranks=ranks,
        **fields,  # type: ignore[arg-type]
    )
