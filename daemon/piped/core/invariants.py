"""What must hold in every state, whatever happened. Checked after loading a store, and after each step in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from piped.core.model import AttemptState, JobState, NodeState, State
from piped.errors import InvariantBroken

_WAITING = (JobState.QUEUED, JobState.HELD, JobState.BACKOFF)
_WITH_ATTEMPT = (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING, JobState.CANCELLING)


def check(state: State) -> None:
    """Raise InvariantBroken with everything that `state` contradicts."""
    broken = [*_jobs(state), *_attempts(state), *_slots(state)]
    if broken:
        raise InvariantBroken("; ".join(broken))


def _jobs(state: State) -> Iterator[str]:
    live = Counter(job.spec.key for job in state.jobs.values() if not job.is_terminal)
    yield from (f"{count} live jobs of {key[0]} are called {key[1]!r}" for key, count in live.items() if count > 1)
    if dict(state.live_names) != {job.spec.key: job.job_id for job in state.jobs.values() if not job.is_terminal}:
        yield f"live_names says {dict(state.live_names)}"
    heads = [job.job_id for job in state.jobs.values() if job.earmark]
    if len(heads) > 1:
        yield f"slots are kept for more than one job: {', '.join(heads)}"
    for job in state.jobs.values():
        attempt = state.attempts.get(job.fence)
        has_live = attempt is not None and not attempt.is_terminal
        if job.state in _WAITING and not job.pending_reason:
            yield f"job {job.job_id} is {job.state.value} without a reason"
        if job.state in _WAITING and has_live:
            yield f"job {job.job_id} is {job.state.value} with a live attempt"
        if (job.state is JobState.BACKOFF) != (job.backoff is not None):
            yield f"job {job.job_id} is {job.state.value} and waits {job.backoff}"
        if job.restarts > job.spec.restarts:
            yield f"job {job.job_id} was restarted {job.restarts} of {job.spec.restarts} times"
        if job.earmark and job.state is not JobState.QUEUED:
            yield f"job {job.job_id} is {job.state.value} and slots are kept for it"
        if job.state in _WITH_ATTEMPT and not has_live:
            yield f"job {job.job_id} is {job.state.value} without a live attempt"
        if job.is_terminal and attempt is not None and has_live and attempt.outcome is not AttemptState.SUCCEEDED:
            yield f"job {job.job_id} is {job.state.value} with a live attempt"
        if (job.state is JobState.FAILED) != (job.failure is not None):
            yield f"job {job.job_id} is {job.state.value} with failure {job.failure}"
        if job.is_terminal != (job.finished_s is not None):
            yield f"job {job.job_id} is {job.state.value} with finished_s {job.finished_s}"
        if job.event_seq > state.event_seq:
            yield f"job {job.job_id} has event {job.event_seq} of {state.event_seq}"


def _attempts(state: State) -> Iterator[str]:
    live = Counter(each.job_id for each in state.attempts.values() if not each.is_terminal)
    yield from (f"job {job_id} has {count} live attempts" for job_id, count in live.items() if count > 1)
    for attempt in state.attempts.values():
        where = f"fence {attempt.fence}"
        if attempt.fence > state.last_fence:
            yield f"{where} is above the last fence {state.last_fence}"
        if attempt.job_id not in state.jobs:
            yield f"{where} is of the unknown job {attempt.job_id}"
        is_stopped = attempt.is_terminal or attempt.state is AttemptState.STOPPING
        if is_stopped != bool(attempt.stop_trigger) or is_stopped != (attempt.outcome is not None):
            yield f"{where} is {attempt.state.value} with trigger {attempt.stop_trigger!r}"
        if attempt.state is AttemptState.RUNNING and any(each.has_failed for each in attempt.workers):
            yield f"{where} runs with a failed worker"


def _slots(state: State) -> Iterator[str]:
    for node_id, node in state.nodes.items():
        if node.state is NodeState.FENCED and any(holder == node_id for holder, _slot in state.reservations):
            yield f"node {node.node_name} is forgotten and still holds slots"
    for key, fence in state.reservations.items():
        attempt = state.attempts.get(fence)
        if attempt is None:
            yield f"slot {key} is held by the unknown fence {fence}"
        elif key not in {(each.node_id, each.slot.index) for each in attempt.placement}:
            yield f"slot {key} is held by fence {fence}, which was not placed there"
    for attempt in state.attempts.values():
        if attempt.state is AttemptState.PREPARING:
            for each in attempt.placement:
                if state.reservations.get((each.node_id, each.slot.index)) != attempt.fence:
                    yield f"fence {attempt.fence} prepares without its slot {each.slot.index} on {each.node_name}"
                if state.nodes[each.node_id].drain is not None:
                    yield f"fence {attempt.fence} prepares on {each.node_name}, which is being drained"
