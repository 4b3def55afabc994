"""A coordinator and nodes in one process, on a virtual clock, with a network that loses, delays, doubles and reorders.

The coordinator is the pure core around what `coordinator.engine` and `coordinator.sessions` do: decide, persist, then act;
it may crash before or after any persisted step. Nodes keep on their disk what shims and daemons keep (which ranks they
started, how these ended, what is not acknowledged), so they survive restarts the way real ones do. Ground truth (which
workers live, which ended well) is theirs alone; `test_fleet` compares the coordinator's word with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from piped.core import desired, effects, events, machine
from piped.core.desired import Phase
from piped.core.liveness import RESTART_GRACE_S, Cadence, Leases
from piped.core.model import Slot, State
from piped.errors import NodeError, UserError

TTL_S = 4.0
BOOT_S = 1000.0


class Crashed(Exception):
    """The coordinator died while it worked on this."""


@dataclass
class Part:
    """What one node has of one attempt."""

    ranks: dict[int, int]  # rank: slot
    has_shim: bool = True
    is_stopping: bool = False
    is_empty: bool = False  # it was stopped, and will start nothing any more
    started: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    succeeded: set[int] = field(default_factory=set)


@dataclass
class SimNode:
    """One machine. `unacked` are facts by key, on its disk."""

    name: str
    num_slots: int
    boot: int = 0
    session: int = 0  # 0: none
    rev: int = 0
    refuses: bool = False
    highest_epoch: int = 0
    highest_fence: int = 0
    parts: dict[int, Part] = field(default_factory=dict)
    unacked: dict[tuple[int, int, type], events.Event] = field(default_factory=dict)

    def report(self, fact: events.Fact, rank: int = -1) -> None:
        self.unacked[fact.fence, rank, type(fact)] = fact

    def hello(self) -> events.NodeRegistered:
        observed = tuple(
            events.ObservedAttempt(fence, part.has_shim, tuple(sorted(part.started)))
            for fence, part in self.parts.items()
            if part.has_shim or any(key[0] == fence for key in self.unacked)
        )
        slots = tuple(Slot(each, f"cpu:{each}") for each in range(self.num_slots))
        return events.NodeRegistered(
            *("", self.name, self.name, f"{self.name}-boot{self.boot}", "0", self.highest_epoch, self.highest_fence),
            *("127.0.0.1", "127.0.0.1:9464", slots),
            attempts=observed,
        )

    def follow(self, rev: int, wanted: tuple[desired.DesiredAttempt, ...]) -> None:
        """Do what the coordinator wants; a lower revision is ignored, what is absent is left alone."""
        if rev < self.rev:
            return
        self.rev = rev
        for each in wanted:
            fence = each.attempt.fence
            self.highest_fence = max(self.highest_fence, fence)
            part = self.parts.get(fence)
            match each.phase:
                case Phase.PREPARE:
                    self._prepare(each, part)
                case Phase.RUN:
                    self._run(fence, part)
                case Phase.STOP if part is None:
                    self.parts[fence] = Part({}, has_shim=False, is_empty=True)
                    self.report(events.AttemptEmptied(self.name, fence))
                case Phase.STOP:
                    part.is_stopping = True
                    if part.is_empty:
                        self.report(events.AttemptEmptied(self.name, fence))

    def _prepare(self, wanted: desired.DesiredAttempt, part: Part | None) -> None:
        fence = wanted.attempt.fence
        if part is None and not self.refuses:
            mine = (each for each in wanted.attempt.placement if each.node_id == self.name)
            self.parts[fence] = Part({each.rank: each.slot.index for each in mine})
            self.report(events.AttemptPrepared(self.name, fence))
        elif part is None or not part.has_shim:
            self.report(events.PrepareRefused(self.name, fence, "no space left"))

    def _run(self, fence: int, part: Part | None) -> None:
        if part is None or (not part.has_shim and not part.started):
            self.report(events.PrepareRefused(self.name, fence, "the preparation is gone"))
            return
        assert not part.is_stopping, f"fence {fence} was told to stop and is told to run"
        if not part.has_shim:
            return
        for rank in part.ranks.keys() - part.started:
            part.started.add(rank)
            part.live.add(rank)
            self.report(events.WorkerSpawned(self.name, fence, rank, 7, 1), rank)

    def join(self, fence: int, rank: int) -> None:
        self.report(events.WorkerJoined(self.name, fence, rank), rank)

    def end(self, fence: int, rank: int, code: int, *, is_ordered: bool = False) -> None:
        """End a live worker; exit code 0 comes with its WorkerDone."""
        part = self.parts[fence]
        part.live.discard(rank)
        if code == 0:
            part.succeeded.add(rank)
            self.report(events.WorkerDone(self.name, fence, rank, 10), rank)
        how = (None, 9) if is_ordered else (code, None)
        self.report(events.WorkerExited(self.name, fence, rank, *how, is_ordered, "", 0), rank)

    def finish_stop(self, fence: int) -> None:
        """The grace is over: what lives is killed, and the node says that it is empty."""
        part = self.parts[fence]
        for rank in sorted(part.live):
            self.end(fence, rank, 137, is_ordered=True)
        part.has_shim, part.is_empty = False, True
        self.report(events.AttemptEmptied(self.name, fence))

    def lose_shim(self, fence: int) -> None:
        """A shim dies with its workers, and no exit record is written."""
        part = self.parts[fence]
        for rank in sorted(part.live):
            self.report(events.WorkerLost(self.name, fence, rank), rank)
        part.has_shim, part.live = False, set()

    def reboot(self) -> None:
        for fence, part in self.parts.items():
            if part.has_shim:
                self.lose_shim(fence)
        self.boot, self.session, self.rev = self.boot + 1, 0, 0


@dataclass
class Message:
    """On its way between a node and the coordinator."""

    node: str
    session: int
    kind: str  # up: facts, gone; down: desired, ack
    body: object = ()


class Fleet:
    """All of it. `state` is what is on the coordinator's disk, and in its memory between two steps."""

    def __init__(self, *num_slots: int, quotas: dict[str, int] | None = None) -> None:
        self.state = State("c1", epoch=1, quotas=quotas or {})
        self.nodes = {f"n{index}": SimNode(f"n{index}", count) for index, count in enumerate(num_slots, 1)}
        self.network: list[Message] = []
        self.now_s = BOOT_S
        self.timers: dict[events.Event, float] = {}
        self.num_sessions = 0
        self.crash_in: tuple[int, bool] | None = None  # after so many steps, before (or after) one is persisted
        self.forgotten: set[tuple[str, int]] = set()  # (node, fence) whose slots an admin freed
        self._start()

    def post(self, event: events.Event) -> State:
        """Decide, persist, act. Raises what the decision raises, and Crashed."""
        before = self.state
        after, performed, _reason = machine.apply(self.state, event, now_s=self.now_s)
        if effects.PlaceQueued() in performed:
            after, more, _reason = machine.apply(after, events.PlacementDue(), now_s=self.now_s)
            performed += more
        is_due = self.crash_in is not None and after is not self.state and self.crash_in[0] == 0
        if is_due and self.crash_in is not None and self.crash_in[1]:
            self.crash()
            raise Crashed
        if self.crash_in is not None and after is not self.state:
            self.crash_in = (self.crash_in[0] - 1, self.crash_in[1])
        self.state = after
        self._note_forgotten(before, event)
        if is_due:
            self.crash()
            raise Crashed
        self._act(performed)
        return after

    def crash(self) -> None:
        """SIGKILL and a new process on the same disk: timers, sessions and effects that were not acted on are gone."""
        self.crash_in = None
        nodes = {key: replace(node, session=0) for key, node in self.state.nodes.items()}
        self.state = replace(self.state, epoch=self.state.epoch + 1, nodes=nodes)
        self.network = [
            each for each in self.network if each.kind in ("desired", "ack")
        ]  # in the nodes' buffers already
        self._start()

    def _start(self) -> None:
        self.open: dict[str, int] = {}
        self.timers = {}
        grace_s = TTL_S + RESTART_GRACE_S if self.state.nodes else 0.0
        self.leases = Leases(Cadence(1.0, TTL_S), last_tick_s=self.now_s, not_before_s=self.now_s + grace_s)
        self._act(effects.pending(self.state, self.now_s))
        self.post(events.CoordinatorStarted())

    def _act(self, performed: tuple[effects.Effect, ...]) -> None:
        for effect in performed:
            match effect:
                case effects.ArmStartDeadline(fence, after_s):
                    self.timers[events.StartDeadlinePassed(fence)] = self.now_s + after_s
                case effects.ArmDrainDeadline(node_id, at_s, after_s):
                    self.timers[events.DrainDeadlinePassed(node_id, at_s)] = self.now_s + after_s
                case effects.ArmQuarantineEnd(node_id, at_s, after_s):
                    self.timers[events.QuarantineEnded(node_id, at_s)] = self.now_s + after_s
                case effects.ArmBackoffEnd(job_id, at_s, after_s):
                    self.timers[events.BackoffEnded(job_id, at_s)] = self.now_s + after_s
                case effects.SendDesired(node_id) if node_id in self.open:
                    body = (self.state.event_seq, desired.of_node(self.state, node_id))
                    self.network.append(Message(node_id, self.open[node_id], "desired", body))
                case effects.CloseSession(node_id) if node_id in self.open:
                    self.disconnect(node_id)

    def _note_forgotten(self, before: State, event: events.Event) -> None:
        held = {(node_id, fence) for (node_id, _slot), fence in before.reservations.items()}
        if isinstance(event, events.ForgetRequested):
            self.forgotten |= {each for each in held if each[0] == event.node_id}

    # ---- the network

    def connect(self, name: str) -> None:
        """Open a session; the node tells everything that is not acknowledged again."""
        node = self.nodes[name]
        self.num_sessions += 1
        session, epoch = self.num_sessions, self.state.epoch
        try:
            self.post(replace(node.hello(), session=session))
        except NodeError:  # refused: it tries again later
            return
        if self.state.epoch != epoch:
            return
        node.session, node.highest_epoch = session, self.state.epoch
        self.open[name] = session
        self.leases.beat(name, self.now_s)
        self._act((effects.SendDesired(name),))
        self.tell(name)

    def disconnect(self, name: str) -> None:
        """The stream breaks. The coordinator hears of it later."""
        session = self.open.pop(name, 0)
        if session:
            self.network.append(Message(name, session, "gone"))

    def tell(self, name: str) -> None:
        """Send every fact that is not acknowledged, in one message."""
        node = self.nodes[name]
        if node.unacked and node.session == self.open.get(name):
            self.network.append(Message(name, node.session, "facts", dict(node.unacked)))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Let a message arrive; with `keep` it arrives once more later."""
        message = self.network[index] if keep else self.network.pop(index)
        node = self.nodes[message.node]
        match message.kind:
            case "facts":
                assert isinstance(message.body, dict)
                order = list(events.Fact.__args__)
                for key, fact in sorted(message.body.items(), key=lambda item: order.index(item[0][2])):
                    self.post(fact)
                    self.network.append(Message(message.node, message.session, "ack", (key, fact)))
            case "gone":
                self.post(events.NodeDisconnected(message.node, message.session))
            case "ack" if message.session == node.session:
                key, fact = message.body  # type: ignore[misc]
                if node.unacked.get(key) is fact:
                    del node.unacked[key]
            case "desired" if message.session == node.session:
                rev, wanted = message.body  # type: ignore[misc]
                node.follow(rev, wanted)
                self.tell(message.node)

    def lose(self, index: int) -> None:
        """A message is lost, and with it its stream."""
        message = self.network.pop(index)
        if message.session == self.open.get(message.node):
            self.disconnect(message.node)
        elif message.kind == "gone":
            self.network.append(message)  # it is the coordinator's own news

    # ---- time

    def pass_time(self, seconds: float) -> None:
        """Let beats arrive, leases end and deadlines pass, second by second."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            for name, session in self.open.items():
                if self.nodes[name].session == session:
                    self.leases.beat(name, self.now_s)
            live = [each.node_id for each in self.state.nodes.values() if not each.is_gone]
            for node_id in self.leases.tick(live, self.now_s):
                self.post(events.LeaseExpired(node_id, self.state.nodes[node_id].incarnation))
            for event in [each for each, due_s in self.timers.items() if due_s <= self.now_s]:
                self.timers.pop(event, None)
                self.post(event)

    # ---- truth

    def live_workers(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (node, slot, fence, rank) of every worker that runs."""
        for node in self.nodes.values():
            for fence, part in node.parts.items():
                yield from ((node.name, part.ranks[rank], fence, rank) for rank in part.live)

    def heal(self) -> None:
        """No more faults: everything that can come back does, every worker finishes, for two virtual minutes and more."""
        self.crash_in = None
        for node in self.nodes.values():
            node.refuses = False
        for _ in range(3):
            for node_id in list(self.state.nodes):
                self.post(events.UncordonRequested(node_id, "ann"))
            for job in list(self.state.jobs.values()):
                self._try(events.ReleaseRequested(job.job_id, "ann"))
            for _ in range(50):
                self._round()
            self.pass_time(60.0)

    def _round(self) -> None:
        for name in self.nodes:
            if name not in self.open:
                self.connect(name)
        while self.network:
            self.deliver(0)
        for name, node in self.nodes.items():
            for fence, part in node.parts.items():
                for rank in sorted(part.live):
                    node.join(fence, rank)
                    node.end(fence, rank, 0)
                if part.is_stopping and not part.is_empty:
                    node.finish_stop(fence)
            self.tell(name)
        self.pass_time(1.0)

    def _try(self, event: events.Event) -> None:
        try:
            self.post(event)
        except (UserError, NodeError):
            pass
