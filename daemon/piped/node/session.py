"""The session with the coordinator: a snapshot, then beats and facts up, desired state and acknowledgements down.

Decides nothing: what comes down goes to the supervisor, what goes up is read from it and from the fact book. A broken
session is opened again; workers do not notice. Built and run by piped.node.app.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc.aio import EOF  # type: ignore[attr-defined]

from pipeapi.v1 import nodes_pb2, nodes_pb2_grpc
from piped.node import convert
from piped.node.clock import ClockOffset
from piped.node.facts import FactBook
from piped.node.model import Fact, Slot
from piped.node.preflight import Wires
from piped.node.state import StateDir
from piped.node.supervisor import Supervisor
from piped.node.tasks import first_of

log = structlog.get_logger()

_OPEN_S = 10.0  # for the coordinator's Welcome
_WRITE_S = 10.0  # for it to take a message: flow control holds a stream whose reader is stuck
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 2.0
_REPORT_BYTES = 1 << 20  # facts per message; a message may have 4 MiB

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),  # the defaults took 4.7 s after an outage, these 0.44 s
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", -1),  # a desired state grows with the jobs here; 4 MiB ended every session
    ("grpc.enable_http_proxy", 0),  # http_proxy breaks loopback
    ("grpc.use_local_subchannel_pool", 1),  # else two channels to one address share a connection
)


class SessionEnded(Exception):
    """The session can't go on; the text says why. A new one is tried."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a node says of itself when it registers."""

    node_id: str
    node_name: str
    host_key: str
    version: str
    data_address: str
    metrics_address: str
    slots: tuple[Slot, ...]
    labels: tuple[tuple[str, str], ...] = ()
    probe_address: str = ""  # where piped.node.edges listens


class Session:
    """Keeps one session open; `run` never returns."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: NodeIdentity,
        state: StateDir,
        supervisor: Supervisor,
        book: FactBook,
        wires: Wires,
        on_registration: Callable[[bool], Awaitable[None]],
        wall_ns: Callable[[], int],
    ) -> None:
        self._stub: Any = nodes_pb2_grpc.NodeServiceStub(channel)
        self._identity = identity
        self._state = state
        self._supervisor = supervisor
        self._book = book
        self._wires = wires
        self._on_registration = on_registration
        self._wall_ns = wall_ns
        self._clock = ClockOffset()
        self._boot_clock = ClockOffset()  # the same of the clocks since boot, by which failures are ordered
        self._told_wires = 0  # the revision that this session's beats have told
        self._acknowledged_s = 0.0
        self._loop_lag_s = 0.0
        self._beat_s, self._ttl_s = 1.0, 4.0  # as the coordinator says

    async def run(self) -> None:
        """Hold sessions until cancelled."""
        last_reason, delay_s = "", _RETRY_MIN_S
        while True:
            began_s = time.monotonic()
            reason = await self._hold()
            await self._on_registration(False)
            if reason != last_reason or time.monotonic() - began_s > 60:
                log.warning("session_ended", reason=reason)
            last_reason = reason
            # An unreachable coordinator costs nothing to try: the channel itself backs off. One that refuses us does.
            was_refused = not reason.startswith("UNAVAILABLE") and time.monotonic() - began_s < _OPEN_S
            delay_s = min(delay_s * 1.5, _RETRY_MAX_S) if was_refused else _RETRY_MIN_S
            await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))

    async def _hold(self) -> str:
        """Hold one session; return why it ended."""
        call = self._stub.Session()
        reason = "the stream is closed"
        try:
            welcome = await self._open(call)
            self._book.resend()
            await self._on_registration(True)
            epoch = welcome.coordinator_epoch
            await first_of(**{"session-hear": self._hear(call, epoch), "session-speak": self._speak(call)})
        except SessionEnded as error:
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:  # a write after the stream's end
            reason = f"the stream is closed: {error}"
        except Exception as error:  # nobody foresaw it; the attempts need this daemon, and a new session may do
            log.exception("session_trouble")
            reason = f"{type(error).__name__}: {error}"
        finally:
            call.cancel()
        return reason

    async def _open(self, call: Any) -> nodes_pb2.Welcome:
        membership = self._state.membership
        observed = self._supervisor.observed()
        hello = nodes_pb2.Hello(
            cluster_id=membership.cluster_id,
            node_id=self._identity.node_id,
            node_name=self._identity.node_name,
            labels=dict(self._identity.labels),
            host_key=self._identity.host_key,
            version=self._identity.version,
            highest_epoch=membership.highest_epoch,
            highest_fence=max([membership.highest_fence, *observed]),
            data_address=self._identity.data_address,
            metrics_address=self._identity.metrics_address,
            slots=[convert.slot_message(slot) for slot in self._identity.slots],
            attempts=[convert.observed_attempt(seen) for seen in observed.values()],
            probe_address=self._identity.probe_address,
        )
        try:
            async with asyncio.timeout(_OPEN_S):
                await call.write(nodes_pb2.SessionRequest(hello=hello))
                first = await call.read()
        except TimeoutError:
            raise SessionEnded(f"no answer within {_OPEN_S} s") from None
        if first is EOF:
            code, details = await call.code(), await call.details()
            raise SessionEnded(f"{code.name}: {details}")
        if first.WhichOneof("message") != "welcome":
            raise SessionEnded(f"the first message is {first.WhichOneof('message')}, no welcome; versions differ?")
        await self._enter(first.welcome)
        return nodes_pb2.Welcome.FromString(first.welcome.SerializeToString())

    async def _enter(self, welcome: nodes_pb2.Welcome) -> None:
        """Check that this is our cluster and its newest coordinator; remember both."""
        membership = self._state.membership
        if membership.cluster_id and welcome.cluster_id != membership.cluster_id:
            raise SessionEnded(
                f"the coordinator belongs to cluster {welcome.cluster_id}, this node to {membership.cluster_id} "
                f"(state_dir {self._state.path}); name the right coordinator, or start with a fresh --state-dir"
            )
        if welcome.coordinator_epoch < membership.highest_epoch:
            raise SessionEnded(
                f"the coordinator's epoch {welcome.coordinator_epoch} is older than {membership.highest_epoch}, which "
                "this node has seen: its store was rolled back or it is no longer the active one"
            )
        epoch = welcome.coordinator_epoch
        try:
            await asyncio.to_thread(self._state.remember, cluster_id=welcome.cluster_id, epoch=epoch)
        except OSError as error:  # a full disk: workers go on, and we join when there is room
            raise SessionEnded(
                f"epoch {epoch} can't be noted in state_dir {self._state.path}: {error}; free some space there"
            ) from error
        self._acknowledged_s = time.monotonic()
        self._beat_s, self._ttl_s = welcome.beat_s, welcome.lease_ttl_s
        log.info("session_open", cluster_id=welcome.cluster_id, epoch=welcome.coordinator_epoch)

    async def _hear(self, call: Any, epoch: int) -> None:
        while (message := await call.read()) is not EOF:
            match message.WhichOneof("message"):
                case "beat_ack":
                    self._acknowledged_s = time.monotonic()
                    self._clock.answered(message.beat_ack.beat_seq, time.monotonic_ns(), message.beat_ack.unix_ns)
                    self._boot_clock.answered(
                        message.beat_ack.beat_seq, time.monotonic_ns(), message.beat_ack.boottime_ns
                    )
                    if message.beat_ack.beat_s:
                        self._beat_s, self._ttl_s = message.beat_ack.beat_s, message.beat_ack.lease_ttl_s
                case "desired":
                    self._supervisor.want(convert.desired_state(message.desired, epoch))
                case "fact_ack":
                    self._supervisor.acknowledge([convert.fact_key(key) for key in message.fact_ack.keys])
        code, details = await call.code(), await call.details()
        raise SessionEnded(f"{code.name}: {details}" if details else f"closed by the coordinator ({code.name})")

    async def _speak(self, call: Any) -> None:
        """Write beats when they are due and facts when there are any: one writer, as a stream allows.

        The first beat comes at any moment of an interval: a fleet that reconnects together shall not beat together.
        """
        self._told_wires, self._clock, self._boot_clock = 0, ClockOffset(), ClockOffset()
        beat_seq, due_s = 0, time.monotonic() + random.uniform(0.0, self._beat_s)
        while True:
            await self._send_facts(call)
            now_s = time.monotonic()
            if now_s >= due_s:
                self._loop_lag_s = now_s - due_s
                due_s = now_s + self._beat_s
                beat_seq += 1
                await self._write(call, nodes_pb2.SessionRequest(beat=self._beat(beat_seq)))
                silent_s = now_s - self._acknowledged_s
                if silent_s > max(self._ttl_s, 3 * self._beat_s):
                    raise SessionEnded(f"no beat was acknowledged for {silent_s:.1f} s")
            try:
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._book.changed.wait()
            except TimeoutError:
                pass

    def _beat(self, beat_seq: int) -> nodes_pb2.Beat:
        desired = self._supervisor.desired
        beat = nodes_pb2.Beat(
            beat_seq=beat_seq,
            sent_boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            loop_lag_s=self._loop_lag_s,
            desired_rev=desired.desired_rev if desired else 0,
            progress=[convert.rank_progress(*one) for one in self._supervisor.progress()],
        )
        if self._clock.best is not None:
            beat.clock_offset_s, beat.clock_error_s = self._clock.best
        if self._told_wires != self._wires.revision:
            self._told_wires = self._wires.revision
            beat.edges.extend(convert.edge_message(edge) for edge in self._wires.all())
        self._clock.sent(beat_seq, time.monotonic_ns(), self._wall_ns())
        self._boot_clock.sent(beat_seq, time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        return beat

    async def _send_facts(self, call: Any) -> None:
        report, size = nodes_pb2.FactReport(), 0
        for fact in self._book.take_unsent():
            message = self._message(fact)
            if message is None:
                continue
            if size and size + message.ByteSize() > _REPORT_BYTES:
                await self._write(call, nodes_pb2.SessionRequest(facts=report))
                report, size = nodes_pb2.FactReport(), 0
            report.facts.append(message)
            size += message.ByteSize()
        if size:
            await self._write(call, nodes_pb2.SessionRequest(facts=report))

    @staticmethod
    async def _write(call: Any, request: nodes_pb2.SessionRequest) -> None:
        try:
            async with asyncio.timeout(_WRITE_S):
                await call.write(request)
        except TimeoutError:
            raise SessionEnded(f"the coordinator took no message for {_WRITE_S} s") from None

    def _message(self, fact: Fact) -> nodes_pb2.Fact | None:
        try:
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            return convert.fact_message(fact, self._boot_clock.best, now_ns=now_ns)
        except ValueError as error:  # a worker of another version, or user code on its channel: never to be sent
            log.error("fact_malformed", error=str(error))
            self._supervisor.acknowledge([fact.key])
            return None
