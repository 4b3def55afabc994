"""Whatever happens in whatever order, the state never contradicts itself and terminal states never change."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from piped.core import events, invariants, machine, queue
from piped.core.effects import PlaceQueued
from piped.core.model import Failure, FailureReason, State, WorkerReport
from piped.errors import NodeError, UserError
from tests.unit.core.build import registration, submission

NODES = st.sampled_from(["n1", "n2", "n3"])
JOBS = st.sampled_from(["j1", "j2", "j3", "j4"])
FENCES = st.integers(1, 6)
RANKS = st.integers(0, 4)
RESTARTS = st.integers(0, 2)
REPORTS = st.builds(
    WorkerReport,
    message=st.just("x"),
    is_transport=st.booleans(),
    peer_rank=st.integers(-1, 4),
    is_numeric=st.booleans(),
)
FACTS = st.one_of(
    st.builds(events.AttemptPrepared, NODES, FENCES),
    st.builds(events.PrepareRefused, NODES, FENCES, st.just("no"), st.booleans()),
    st.builds(events.WorkerSpawned, NODES, FENCES, RANKS, st.just(7), st.just(1)),
    st.builds(events.StoreListened, NODES, FENCES, st.just("h:1")),
    st.builds(events.WorkerJoined, NODES, FENCES, RANKS),
    st.builds(events.WorkerFailed, NODES, FENCES, RANKS, REPORTS, st.integers(0, 9)),
    st.builds(events.WorkerDone, NODES, FENCES, RANKS, st.just(10)),
    st.builds(
        events.WorkerExited,
        NODES,
        FENCES,
        RANKS,
        st.sampled_from([0, 1]),
        st.none(),
        st.booleans(),
        st.just(""),
        st.just(0),
    ),
    st.builds(events.WorkerLost, NODES, FENCES, RANKS),
    st.builds(events.WorkerUnkillable, NODES, FENCES, RANKS),
    st.builds(
        events.HangFound,
        FENCES,
        st.builds(Failure, st.just(FailureReason.HANG), st.just("stands still"), st.integers(-1, 0)),
    ),
    st.builds(events.AttemptEmptied, NODES, FENCES),
    st.builds(events.StartDeadlinePassed, FENCES),
    st.builds(events.BackoffEnded, JOBS, st.just(1.0)),
    st.builds(events.StoreRetried),
)


class AnyOrder(RuleBasedStateMachine):
    """Three small nodes, four jobs, every event that the wire allows."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State("c1", epoch=1)
        self.ended: dict[str, object] = {}

    def feed(self, event: events.Event) -> None:
        before = self.state
        try:
            self.state, effects, reason = machine.apply(self.state, event, now_s=1.0)
            if PlaceQueued() in effects:
                self.state, _, _ = machine.apply(self.state, events.PlacementDue(), now_s=1.0)
        except (UserError, NodeError):
            return
        assert reason
        self.nothing_overtakes_the_head(before)

    def nothing_overtakes_the_head(self, before: State) -> None:
        """What was kept for the head, and still is, went to nobody but those before it in the queue."""
        for head in (each for each in before.jobs.values() if each.earmark):
            for key in head.earmark if self.state.jobs[head.job_id].earmark else ():
                fence = self.state.reservations.get(key)
                if fence is not None and key not in before.reservations:
                    taker = self.state.jobs[self.state.attempts[fence].job_id]
                    assert queue.order(taker) < queue.order(head)

    @initialize(quota=st.sampled_from([None, 2]))
    def configure(self, quota: int | None) -> None:
        self.state = replace(self.state, quotas={} if quota is None else {"default": quota})

    @rule(node=NODES, slots=st.integers(1, 3), keeps=st.booleans(), session=st.integers(1, 2))
    def register(self, node: str, slots: int, keeps: bool, session: int) -> None:
        kept = tuple(events.ObservedAttempt(fence, True) for fence in self.state.attempts) if keeps else ()
        self.feed(registration(node, slots, attempts=kept, session=session))

    @rule(job=JOBS, stages=st.integers(1, 4), replicas=st.integers(1, 2), priority=st.integers(0, 2), restarts=RESTARTS)
    def submit(self, job: str, stages: int, replicas: int, priority: int, restarts: int) -> None:
        key = {"tenant": "b", "name": "j1"} if job == "j4" else {"name": job}  # two tenants' jobs of one name
        shape = {"stages": stages, "replicas": replicas, "priority": priority}
        self.feed(submission(job, restarts=restarts, **key, **shape))

    @rule(job=JOBS, is_hold=st.booleans())
    def hold(self, job: str, is_hold: bool) -> None:
        self.feed(events.HoldRequested(job, "ann", "") if is_hold else events.ReleaseRequested(job, "ann"))

    @rule(job=JOBS)
    def cancel(self, job: str) -> None:
        self.feed(events.CancelRequested(job))

    @rule(node=NODES, number=st.integers(1, 2), is_lost=st.booleans())
    def leave(self, node: str, number: int, is_lost: bool) -> None:
        self.feed(events.LeaseExpired(node, number) if is_lost else events.NodeDisconnected(node, number))

    @rule(node=NODES, within_s=st.sampled_from([0.0, 60.0]), verb=st.sampled_from("cudpfq"))
    def operate(self, node: str, within_s: float, verb: str) -> None:
        asked: dict[str, events.Event] = {
            "c": events.CordonRequested(node, "ann", ""),
            "u": events.UncordonRequested(node, "ann"),
            "d": events.DrainRequested(node, "ann", "", within_s),
            "p": events.DrainDeadlinePassed(node, 1.0),
            "q": events.QuarantineEnded(node, 1.0),
            "f": events.ForgetRequested(node, "ann", ""),
        }
        self.feed(asked[verb])

    @rule(fact=FACTS)
    def report(self, fact: events.Event) -> None:
        self.feed(fact)

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Do the likely next thing, so that runs get far."""
        live = [each for each in self.state.attempts.values() if not each.is_terminal]
        if live:
            attempt = data.draw(st.sampled_from(live))
            for each in attempt.placement:
                self.feed(events.AttemptPrepared(each.node_id, attempt.fence))
                self.feed(events.WorkerJoined(each.node_id, attempt.fence, each.rank))

    @invariant()
    def nothing_is_contradicted(self) -> None:
        invariants.check(self.state)

    @invariant()
    def terminal_states_stay(self) -> None:
        for job in self.state.jobs.values():
            if job.is_terminal:
                assert self.ended.setdefault(job.job_id, (job.state, job.failure)) == (job.state, job.failure)


AnyOrder.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
