"""Whatever is lost, delayed, doubled or killed: nothing is lost, nothing runs twice, and in the end nothing is left.

After each step the coordinator's word is compared with what the nodes know; at the end every fault stops, and every job
must have come to an end, or be one that the fleet could never hold.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from piped.core import events, invariants, placement
from piped.core.model import Job, JobState
from piped.errors import NodeError, UserError
from tests.unit.core.build import submission
from tests.unit.core.fleet import Crashed, Fleet

SLOTS = {"n1": 1, "n2": 2, "n3": 2}
NODES = st.sampled_from(sorted(SLOTS))
MAX_JOBS = 6


class FaultyFleet(RuleBasedStateMachine):
    """Three nodes with five slots, up to six jobs, every verb, every fault."""

    @initialize(quota=st.sampled_from([None, None, 3]), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def start(self, quota: int | None, sizes: list[int]) -> None:
        self.fleet = Fleet(*SLOTS.values(), quotas={} if quota is None else {"default": quota})
        self.quota = quota
        self.requests: list[events.JobSubmitted] = []
        self.accepted: dict[str, str] = {}  # request id: job id, as answered
        self.ended: dict[str, Job] = {}
        for name in SLOTS:
            self.fleet.connect(name)
        for stages in sizes:
            self.submit(stages, 1, 0, 2)

    def guarded(self, act: Callable[[], object]) -> bool:
        """Do it; False if it was refused, or the coordinator crashed over it."""
        try:
            act()
        except (UserError, NodeError, Crashed):
            return False
        return True

    # ---- clients and operators

    @precondition(lambda self: len(self.requests) < MAX_JOBS)
    @rule(
        stages=st.integers(1, 3),
        replicas=st.integers(1, 2),
        priority=st.integers(0, 2),
        restarts=st.sampled_from([0, 2]),
    )
    def submit(self, stages: int, replicas: int, priority: int, restarts: int) -> None:
        name = f"j{len(self.requests)}"
        spec = {"stages": stages, "replicas": replicas, "priority": priority, "start_timeout_s": 20}
        spec["restarts"] = restarts
        self.requests.append(submission(name, name=name, **spec))
        self._send(self.requests[-1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), number=st.integers(0, 99))
    def submit_again(self, data: st.DataObject, number: int) -> None:
        """A client that got no answer, or lost it, asks again; its new id must not count."""
        request = data.draw(st.sampled_from(self.requests))
        job_id = f"{request.job_id}-again{number}"
        self._send(events.JobSubmitted(job_id, request.request_id, request.spec_hash, request.spec))

    def _send(self, request: events.JobSubmitted) -> None:
        if self.guarded(lambda: self.fleet.post(request)):
            job_id = self.fleet.state.submissions[request.spec.tenant, request.request_id].job_id
            assert self.accepted.setdefault(request.request_id, job_id) == job_id

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), verb=st.sampled_from(["cancel", "hold", "release"]))
    def ask(self, data: st.DataObject, verb: str) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.accepted.values())))
        asked: dict[str, events.Event] = {
            "cancel": events.CancelRequested(job_id),
            "hold": events.HoldRequested(job_id, "ann", ""),
            "release": events.ReleaseRequested(job_id, "ann"),
        }
        self.guarded(lambda: self.fleet.post(asked[verb]))

    @rule(node=NODES, verb=st.sampled_from(["cordon", "uncordon", "uncordon", "drain", "empty"]))
    def operate(self, node: str, verb: str) -> None:
        asked: dict[str, events.Event] = {
            "cordon": events.CordonRequested(node, "ann", ""),
            "uncordon": events.UncordonRequested(node, "ann"),
            "drain": events.DrainRequested(node, "ann", "", 5.0),
            "empty": events.DrainRequested(node, "ann", "", 0.0),
        }
        self.guarded(lambda: self.fleet.post(asked[verb]))

    # ---- the likely course of things

    @rule(rounds=st.integers(1, 3), joins=st.booleans())
    def advance(self, rounds: int, joins: bool) -> None:
        """Every node is connected, everything on its way arrives in order, workers join."""
        for _ in range(rounds):
            for node in SLOTS:
                self.connect_if_away(node)
            self.flush()
            for node, _slot, fence, rank in list(self.fleet.live_workers()) if joins else ():
                self.fleet.nodes[node].join(fence, rank)
                self.fleet.tell(node)

    def flush(self) -> None:
        while self.fleet.network and self.guarded(lambda: self.fleet.deliver(0)):
            pass

    def connect_if_away(self, node: str) -> None:
        if node not in self.fleet.open:
            self.guarded(lambda: self.fleet.connect(node))

    @rule(data=st.data(), how=st.sampled_from(["succeed", "succeed", "fail"]), everyone=st.booleans())
    def work(self, data: st.DataObject, how: str, everyone: bool) -> None:
        """Workers end, one or all."""
        live = list(self.fleet.live_workers())
        if live:
            for node, _slot, fence, rank in live if everyone else [data.draw(st.sampled_from(live))]:
                self.fleet.nodes[node].join(fence, rank)
                self.fleet.nodes[node].end(fence, rank, int(how == "fail"))
                self.fleet.tell(node)

    @rule(node=NODES)
    def finish_stops(self, node: str) -> None:
        for fence, part in self.fleet.nodes[node].parts.items():
            if part.is_stopping and not part.is_empty:
                self.fleet.nodes[node].finish_stop(fence)
        self.fleet.tell(node)

    @rule(seconds=st.sampled_from([1.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.guarded(lambda: self.fleet.pass_time(seconds))

    # ---- faults

    @precondition(lambda self: self.fleet.network)
    @rule(data=st.data(), how=st.sampled_from(["late", "twice", "never"]))
    def meddle(self, data: st.DataObject, how: str) -> None:
        """A message overtakes the others, arrives twice, or is lost."""
        index = data.draw(st.integers(0, len(self.fleet.network) - 1))
        if how == "never":
            self.fleet.lose(index)
        else:
            self.guarded(lambda: self.fleet.deliver(index, keep=how == "twice"))

    @rule(node=NODES, how=st.sampled_from(["cut", "partition", "forget", "fill", "empty", "kill", "reboot"]))
    def harm(self, node: str, how: str) -> None:
        """A stream breaks, a lease ends while the workers go on, a disk is full, shims die, a machine starts again."""
        machine = self.fleet.nodes[node]
        if how in ("fill", "empty"):
            machine.refuses = how == "fill"
            return
        if how == "kill":
            for fence in [each for each, part in machine.parts.items() if part.has_shim]:
                machine.lose_shim(fence)
            self.fleet.tell(node)
            return
        self.fleet.disconnect(node)
        if how == "reboot":
            machine.reboot()
        elif how != "cut":
            self.guarded(lambda: self.fleet.pass_time(45.0))
            if how == "forget":
                self.guarded(lambda: self.fleet.post(events.ForgetRequested(node, "ann", "")))

    @rule(steps=st.integers(0, 6), is_before=st.booleans())
    def crash_soon(self, steps: int, is_before: bool) -> None:
        """The coordinator dies at a persisted step, before or after it is persisted."""
        self.fleet.crash_in = (steps, is_before)

    # ---- what must hold

    @invariant()
    def the_state_agrees_with_itself(self) -> None:
        invariants.check(self.fleet.state)

    @invariant()
    def no_accepted_job_is_lost_and_no_end_changes(self) -> None:
        jobs = self.fleet.state.jobs
        assert set(self.accepted.values()) <= jobs.keys()
        for job in (each for each in jobs.values() if each.is_terminal):
            first = self.ended.setdefault(job.job_id, job)
            assert (job.state, job.failure) == (first.state, first.failure)

    @invariant()
    def no_slot_has_two_workers_and_none_works_in_a_slot_that_is_not_its_own(self) -> None:
        taken: dict[tuple[str, int], int] = {}
        for node, slot, fence, _rank in self.fleet.live_workers():
            assert taken.setdefault((node, slot), fence) == fence
            holder = self.fleet.state.reservations.get((node, slot))
            assert holder == fence or (node, fence) in self.fleet.forgotten

    @invariant()
    def no_job_runs_twice_but_on_a_node_that_an_operator_said_was_gone(self) -> None:
        running: dict[str, set[tuple[str, int]]] = {}
        for node, _slot, fence, _rank in self.fleet.live_workers():
            running.setdefault(self.fleet.state.attempts[fence].job_id, set()).add((node, fence))
        for job_id, parts in running.items():
            newest = self.fleet.state.jobs[job_id].fence
            assert {each for each in parts if each[1] != newest} <= self.fleet.forgotten

    @invariant()
    def a_job_has_succeeded_only_if_all_its_ranks_have(self) -> None:
        for job in self.fleet.state.jobs.values():
            if job.state is JobState.SUCCEEDED:
                for each in self.fleet.state.attempts[job.fence].placement:
                    assert each.rank in self.fleet.nodes[each.node_id].parts[job.fence].succeeded

    def teardown(self) -> None:
        """Without faults everything comes to its end, and nothing is left."""
        if not hasattr(self, "fleet"):
            return
        self.fleet.heal()
        assert not list(self.fleet.live_workers())
        assert not self.fleet.state.reservations
        for job in self.fleet.state.jobs.values():
            is_too_large = not placement.can_ever_fit(job.spec, self.fleet.state.nodes.values())
            is_over_quota = self.quota is not None and job.spec.world_size > self.quota
            assert job.is_terminal or (job.state is JobState.QUEUED and (is_too_large or is_over_quota)), job


def run(num_examples: int) -> None:
    checks = settings(
        max_examples=num_examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(FaultyFleet, settings=checks)  # type: ignore[no-untyped-call]


def test_a_fleet_full_of_faults_loses_nothing_and_runs_nothing_twice():
    run(300)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_fleet_full_of_faults_loses_nothing_and_runs_nothing_twice_ten_thousand_times():
    run(10_000)
