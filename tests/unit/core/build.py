"""Small states and the events that lead to them, for tests of piped.core."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from piped.core import events, invariants, machine
from piped.core.effects import Effect, PlaceQueued
from piped.core.model import Attempt, Job, JobSpec, Slot, State, WorkerReport

GPT = JobSpec(
    name="gpt",
    program="stagekit.examples.gpt:Program",
    stages=2,
    stages_per_rank=1,
    replicas=1,
    schedule="1f1b",
    chunks=4,
    steps=10,
    log_every=10,
    device="auto",
    slots_per_node=0,
    grace_s=5,
    env=(),
    source_sha256="",
    payload=b"",
)


def spec(**changes: object) -> JobSpec:
    return replace(GPT, **changes)  # type: ignore[arg-type]


def registration(name: str, num_slots: int = 2, **changes: object) -> events.NodeRegistered:
    """Return the first registration of a node whose id is its name."""
    slots = tuple(Slot(each, f"cpu:{each}") for each in range(num_slots))
    event = events.NodeRegistered("", name, name, f"boot-{name}", "0", 0, 0, "127.0.0.1", "127.0.0.1:9464", slots)
    return replace(event, **changes)  # type: ignore[arg-type]


def submission(job_id: str = "j1", **changes: object) -> events.JobSubmitted:
    return events.JobSubmitted(job_id, f"request-{job_id}", f"hash-{job_id}", spec(**changes))


@dataclass
class Cluster:
    """A state that moves by events; checks the invariants after each."""

    state: State = field(default_factory=lambda: State("c1", epoch=1))
    effects: tuple[Effect, ...] = ()
    reason: str = ""
    now_s: float = 1000.0

    def feed(self, *happened: events.Event) -> Cluster:
        for event in happened:
            self.state, self.effects, self.reason = machine.apply(self.state, event, now_s=self.now_s)
            if PlaceQueued() in self.effects:
                self.state, more, _ = machine.apply(self.state, events.PlacementDue(), now_s=self.now_s)
                self.effects += more
            invariants.check(self.state)
        return self

    def job(self, job_id: str = "j1") -> Job:
        return self.state.jobs[job_id]

    def attempt(self, fence: int = 1) -> Attempt:
        return self.state.attempts[fence]

    def node_of(self, rank: int, fence: int = 1) -> str:
        return self.attempt(fence).placement[rank].node_id

    def prepare(self, fence: int = 1) -> Cluster:
        return self.feed(*(events.AttemptPrepared(each, fence) for each in self.attempt(fence).node_ids))

    def join(self, fence: int = 1) -> Cluster:
        ranks = range(len(self.attempt(fence).workers))
        return self.feed(*(events.WorkerJoined(self.node_of(each, fence), fence, each) for each in ranks))

    def run(self, fence: int = 1) -> Cluster:
        """Bring the attempt to RUNNING."""
        return self.prepare(fence).join(fence)

    def exit(self, rank: int, fence: int = 1, **changes: object) -> Cluster:
        """Report the end of a rank; by default exit code 0."""
        event = events.WorkerExited(self.node_of(rank, fence), fence, rank, 0, None, False, f"tail {rank}", 0)
        return self.feed(replace(event, **changes))  # type: ignore[arg-type]

    def done(self, rank: int, fence: int = 1) -> Cluster:
        return self.feed(events.WorkerDone(self.node_of(rank, fence), fence, rank, 10))

    def fail(self, rank: int, at_ns: int = 0, fence: int = 1, **report: object) -> Cluster:
        """Report a worker's own account of its failure."""
        account = WorkerReport(**{"message": f"error of {rank}", **report})  # type: ignore[arg-type]
        return self.feed(events.WorkerFailed(self.node_of(rank, fence), fence, rank, account, at_ns))

    def wait(self, job_id: str = "j1") -> Cluster:
        """Let the job's backoff pass, if it has one."""
        backoff = self.job(job_id).backoff
        if backoff is not None:
            self.now_s += backoff.for_s
            self.feed(events.BackoffEnded(job_id, backoff.at_s))
        return self

    def empty(self, fence: int = 1) -> Cluster:
        """Have every node of the attempt report it empty."""
        return self.feed(*(events.AttemptEmptied(each, fence) for each in self.attempt(fence).node_ids))


def cluster(*num_slots: int) -> Cluster:
    """Return a cluster with nodes n1, n2, … of so many slots."""
    return Cluster().feed(*(registration(f"n{index}", count) for index, count in enumerate(num_slots, 1)))
