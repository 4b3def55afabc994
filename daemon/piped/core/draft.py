"""The state while one event is applied: copied on the first write, with the effects and the log lines it caused.

Only the modules of piped.core that apply events use it; nothing outside sees a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piped.core.effects import Effect, NotifyWatchers, PlaceQueued, SendDesired, WriteRecord
from piped.core.model import Artifact, Attempt, Job, Node, Record, SlotKey, State, Submission, TenantKey, Wire


class Draft:
    """A writable view of `state`. Read the mappings, write through the methods."""

    def __init__(self, state: State, now_s: float) -> None:
        self._base = state
        self.now_s = now_s
        self.cluster_id, self.epoch = state.cluster_id, state.epoch
        self.event_seq, self.last_fence = state.event_seq, state.last_fence
        self.nodes: Mapping[str, Node] = state.nodes
        self.jobs: Mapping[str, Job] = state.jobs
        self.live_names: Mapping[TenantKey, str] = state.live_names
        self.attempts: Mapping[int, Attempt] = state.attempts
        self.reservations: Mapping[SlotKey, int] = state.reservations
        self.submissions: Mapping[TenantKey, Submission] = state.submissions
        self.artifacts: Mapping[str, Artifact] = state.artifacts
        self.quotas: Mapping[str, int] = state.quotas
        self.wires: Mapping[Wire, float] = state.wires
        self._owned: dict[str, dict[Any, Any]] = {}
        self._effects: dict[Effect, None] = {}

    def _table(self, name: str) -> dict[Any, Any]:
        if name not in self._owned:
            self._owned[name] = dict(getattr(self, name))
            setattr(self, name, self._owned[name])
        return self._owned[name]

    def put_node(self, node: Node) -> None:
        self._table("nodes")[node.node_id] = node

    def put_job(self, job: Job) -> None:
        self._table("jobs")[job.job_id] = job
        if job.is_terminal and self.live_names.get(job.spec.key) == job.job_id:
            del self._table("live_names")[job.spec.key]
        elif not job.is_terminal and job.spec.key not in self.live_names:
            self._table("live_names")[job.spec.key] = job.job_id
        self.add_effect(NotifyWatchers(job.job_id))

    def put_attempt(self, attempt: Attempt) -> None:
        self._table("attempts")[attempt.fence] = attempt
        self.add_effect(NotifyWatchers(attempt.job_id))

    def put_submission(self, submission: Submission) -> None:
        self._table("submissions")[submission.tenant, submission.request_id] = submission

    def put_artifact(self, artifact: Artifact) -> None:
        self._table("artifacts")[artifact.sha256] = artifact

    def put_wire(self, wire: Wire, bytes_per_s: float) -> None:
        self._table("wires")[wire] = bytes_per_s

    def reserve(self, key: SlotKey, fence: int) -> None:
        self._table("reservations")[key] = fence

    def release(self, node_id: str, fence: int) -> bool:
        """Free the slots that `fence` holds on the node; return whether there were any."""
        held = [key for key, holder in self.reservations.items() if key[0] == node_id and holder == fence]
        if held:
            table = self._table("reservations")
            for key in held:
                del table[key]
            self.place_queued()
        return bool(held)

    def next_fence(self) -> int:
        """Return a fence above every earlier one."""
        self.last_fence += 1
        return self.last_fence

    def lift(self, by: int) -> None:
        """Skip so many epochs, fences and event numbers: a part of the store that was lost may have given them out."""
        self.epoch, self.last_fence, self.event_seq = self.epoch + by, self.last_fence + by, self.event_seq + by

    def add_effect(self, effect: Effect) -> None:
        self._effects[effect] = None

    def place_queued(self) -> None:
        """A job, a slot or a node came or went: have the queue looked at."""
        self.add_effect(PlaceQueued())

    def send_desired(self, attempt: Attempt) -> None:
        """Have every node of `attempt` told what it must hold now."""
        for node_id in attempt.node_ids:
            self.add_effect(SendDesired(node_id))

    def record(self, name: str, reason: str, *, job_id: str = "", node_name: str = "") -> None:
        """Write one line of the event log, and its number into the job."""
        self.event_seq += 1
        self.add_effect(WriteRecord(Record(self.event_seq, self.now_s, name, reason, job_id, node_name)))
        if job_id in self.jobs:
            self.put_job(replace(self.jobs[job_id], event_seq=self.event_seq))

    def finish(self) -> tuple[State, tuple[Effect, ...]]:
        """Return the new state, which is the old one if nothing changed, and the effects."""
        if not self._owned and self.event_seq == self._base.event_seq:
            return self._base, tuple(self._effects)
        if self.event_seq == self._base.event_seq:
            self.event_seq += 1
        state = State(
            self.cluster_id,
            self.epoch,
            self.event_seq,
            self.last_fence,
            self.nodes,
            self.jobs,
            self.live_names,
            self.attempts,
            self.reservations,
            self.submissions,
            self.artifacts,
            self.quotas,
            self.wires,
        )
        return state, tuple(self._effects)
