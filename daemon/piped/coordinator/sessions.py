"""The open node sessions: registration, beats, facts up; desired state and acknowledgements down.

A session decides nothing: it turns messages into events, and acknowledges a fact only when its event is durable.
One node has one session; a newer one ends the older. The lease ticker lives here because beats do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import structlog

from pipeapi.v1 import nodes_pb2, nodes_pb2_grpc
from piped import wire
from piped.coordinator.bulk import BulkLinks
from piped.coordinator.engine import Engine
from piped.coordinator.hangs import HangWatch
from piped.coordinator.links import LinkBoard
from piped.coordinator.progress import ProgressBoard
from piped.coordinator.pushes import Pushes
from piped.coordinator.tasks import first_of, write
from piped.core.events import LeaseExpired, NodeDisconnected
from piped.core.liveness import Leases
from piped.core.model import Node
from piped.errors import BugError, LeaseLost, PipedError, RegistrationRefused, UnavailableError

HELLO_DEADLINE_S = 10.0
MAX_REPORTS = 16  # of one node that wait to be decided, before nothing more is read from it
log = structlog.get_logger("coordinator")
Stream = grpc.aio.ServicerContext[Any, Any]


def boottime_s() -> float:
    """Return the clock of leases: it counts on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class OpenSession:
    """One stream. What is to be sent waits in `outbox`; the desired state is built when it is sent."""

    node_id: str
    number: int
    outbox: deque[nodes_pb2.SessionResponse] = field(default_factory=deque)
    reports: asyncio.Queue[nodes_pb2.FactReport] = field(default_factory=lambda: asyncio.Queue(MAX_REPORTS))
    is_desired_due: bool = False
    ending: PipedError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: nodes_pb2.SessionResponse) -> None:
        self.outbox.append(message)
        self.wake.set()

    def send_desired(self) -> None:
        self.is_desired_due = True
        self.wake.set()

    def end(self, error: PipedError) -> None:
        """Have the stream closed with `error`; the first error stands."""
        self.ending = self.ending or error
        self.wake.set()


class NodeService(nodes_pb2_grpc.NodeServiceServicer):
    """The servicer of both node streams, and the engine's `Links`."""

    def __init__(self, engine: Engine, board: ProgressBoard, bulk: BulkLinks, leases: Leases, hangs: HangWatch) -> None:
        self._engine, self._board, self._bulk, self._leases, self._hangs = engine, board, bulk, leases, hangs
        self._small = leases.cadence  # of a fleet of no more than a thousand
        self.links = LinkBoard()
        self._pushes = Pushes(self.links)
        self._open: dict[str, OpenSession] = {}
        self._stopping: UnavailableError | None = None
        self._numbers = itertools.count(1)

    def send_desired(self, node_id: str) -> None:
        if node_id in self._open:
            self._open[node_id].send_desired()

    def close_session(self, node_id: str, reason: str) -> None:
        if node_id in self._open:
            self._open[node_id].end(LeaseLost(f"{reason}; register again"))

    def end_all(self) -> None:
        """Close every stream and refuse new ones: the coordinator is stopping."""
        self._stopping = UnavailableError("the coordinator is stopping; reconnect")
        for session in self._open.values():
            session.end(self._stopping)
        self._bulk.end_all(self._stopping)

    def lease_age_s(self, node_id: str) -> float:
        """Return the seconds since the node's last beat."""
        return max(0.0, boottime_s() - self._leases.received_s.get(node_id, boottime_s()))

    def lease_expires_in_s(self, node_id: str) -> float:
        """Return the seconds until the node's lease ends."""
        return self._leases.expires_s(node_id) - boottime_s()

    async def tick_leases(self) -> None:
        """Post LeaseExpired for silent nodes, until cancelled."""
        while True:
            await asyncio.sleep(self._leases.cadence.beat_s / 4)
            nodes = self._engine.state.nodes
            live = [each.node_id for each in nodes.values() if not each.is_gone]
            self._leases.cadence = self._small.for_fleet(len(live))
            if not self._engine.is_storing:
                self._leases.pause(boottime_s())
            for node_id in self._leases.tick(live, boottime_s()):
                try:
                    await self._engine.post(LeaseExpired(node_id, nodes[node_id].incarnation))
                except UnavailableError:  # logged by the engine; the next tick tries again
                    break

    async def Session(self, _requests: object, context: Stream) -> None:
        """Serve one node until its stream ends, its lease is lost or a newer session replaces it."""
        session = await self._register(context)
        try:
            await first_of(self._receive(session, context), self._decide(session), self._send(session, context))
        finally:
            if self._open.get(session.node_id) is session:
                del self._open[session.node_id]
                self._engine.post_later(NodeDisconnected(session.node_id, session.number))

    async def Bulk(self, _requests: object, context: Stream) -> None:
        """Serve one node's answers to questions about files."""
        if self._stopping is not None:
            raise self._stopping
        await self._bulk.serve(context)

    async def _register(self, context: Stream) -> OpenSession:
        if self._stopping is not None:
            raise self._stopping
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                first = await context.read()
        except TimeoutError:
            raise RegistrationRefused(f"no Hello within {HELLO_DEADLINE_S:.0f} s of opening the session") from None
        if not isinstance(first, nodes_pb2.SessionRequest) or first.WhichOneof("message") != "hello":
            raise RegistrationRefused("the first message of a session must be Hello")
        number = next(self._numbers)
        registration = replace(wire.registration_from_proto(first.hello), session=number)
        try:
            state = await self._engine.post(registration)
        except asyncio.CancelledError:  # the stream ended meanwhile; the registration may stand all the same
            self._engine.post_later(NodeDisconnected(registration.node_id, number))
            raise
        node: Node = state.nodes[registration.node_id]
        self.links.register(node.node_id, first.hello)
        self._leases.beat(node.node_id, boottime_s())
        cadence = self._leases.cadence
        session = OpenSession(node.node_id, number)
        if node.node_id in self._open:
            self._open[node.node_id].end(LeaseLost("a newer session of the same node replaced this one"))
        self._open[node.node_id] = session
        welcome = nodes_pb2.Welcome(
            cluster_id=state.cluster_id,
            coordinator_epoch=state.epoch,
            incarnation=node.incarnation,
            beat_s=cadence.beat_s,
            lease_ttl_s=cadence.ttl_s,
        )
        session.send(nodes_pb2.SessionResponse(welcome=welcome))
        session.send_desired()
        return session

    async def _receive(self, session: OpenSession, context: Stream) -> None:
        while isinstance(message := await context.read(), nodes_pb2.SessionRequest):
            if session.ending is not None:
                return
            match message.WhichOneof("message"):
                case "beat":
                    self._take_beat(session, message.beat)
                case "facts":
                    self._leases.hear(session.node_id, boottime_s())
                    await session.reports.put(message.facts)
                case "hello":
                    raise RegistrationRefused("a second Hello on one session; open a new stream to register again")

    async def _decide(self, session: OpenSession) -> None:
        """Take reports of facts one after the other; the beats behind them are heard meanwhile."""
        while True:
            await self._take_facts(session, await session.reports.get())

    def _take_beat(self, session: OpenSession, beat: nodes_pb2.Beat) -> None:
        boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        ack = nodes_pb2.BeatAck(beat_seq=beat.beat_seq, unix_ns=time.time_ns(), boottime_ns=boottime_ns)
        self.links.beat(session.node_id, beat)
        if beat.edges:
            self._engine.post_later(wire.wires_from_proto(session.node_id, beat.edges))
        if cadence := self._leases.beat(session.node_id, boottime_s()):
            ack.beat_s, ack.lease_ttl_s = cadence.beat_s, cadence.ttl_s
        session.send(nodes_pb2.SessionResponse(beat_ack=ack))
        for each in beat.progress:
            attempt = self._engine.state.attempts.get(each.fence)
            if attempt is None or not attempt.is_on(each.rank, session.node_id):
                continue
            if each.HasField("position"):
                now_s = asyncio.get_running_loop().time()
                self._hangs.note(each.fence, each.rank, wire.position_from_proto(each.position), now_s)
            progress = wire.progress_from_proto(each.progress)
            if each.HasField("progress") and self._board.update(each.fence, each.rank, progress):
                self._engine.notify(attempt.job_id)

    async def _take_facts(self, session: OpenSession, report: nodes_pb2.FactReport) -> None:
        """Post the facts in the order in which they can have happened, and acknowledge the durable ones."""
        keyed = sorted(((wire.fact_key(each), each) for each in report.facts), key=lambda pair: pair[0].kind)
        events = [wire.fact_from_proto(session.node_id, fact) for _key, fact in keyed]
        posted = [self._engine.post(event) for event in events if event is not None]
        for outcome in await asyncio.gather(*posted, return_exceptions=True):
            if isinstance(outcome, BugError):
                continue  # logged by the engine; the same fact would fail again
            if isinstance(outcome, BaseException):
                raise outcome
        session.send(nodes_pb2.SessionResponse(fact_ack=nodes_pb2.FactAck(keys=[key for key, _fact in keyed])))

    async def _send(self, session: OpenSession, context: Stream) -> None:
        while True:
            await session.wake.wait()
            session.wake.clear()
            while session.outbox:
                await write(context, session.outbox.popleft())
            if session.ending is not None:
                raise session.ending
            if session.is_desired_due:
                session.is_desired_due = False
                await write(context, self._pushes.message_for(self._engine.state, session.node_id))
