"""Attempt lifecycle: from reserved slots to nodes that hold nothing of it any more.

A fact changes what is known of a worker; then `_judge` decides whether the attempt runs, has succeeded or must stop.
`stop_trigger` and `outcome` are written once. STOPPING ends when every node of the attempt has reported it empty;
nodes that are LOST are not waited for, but their slots stay reserved. Where the job is to start anew, the attempt also
waits for LOST nodes whose ranks may still run: until they report, or are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from piped.core import events, jobs, quarantine, retries, root_cause
from piped.core.draft import Draft
from piped.core.effects import ArmStartDeadline, SendDesired
from piped.core.model import (
    Attempt,
    AttemptState,
    FailureReason,
    Job,
    JobState,
    RankPlacement,
    Worker,
    WorkerState,
)
from piped.errors import IllegalTransition

_A = AttemptState
NEXT: dict[AttemptState, frozenset[AttemptState]] = {  # what is not in a row is illegal, and raises
    _A.RESERVED: frozenset({_A.PREPARING}),
    _A.PREPARING: frozenset({_A.PREPARED, _A.STOPPING}),
    _A.PREPARED: frozenset({_A.COMMITTED}),
    _A.COMMITTED: frozenset({_A.RUNNING, _A.STOPPING}),
    _A.RUNNING: frozenset({_A.STOPPING}),
    _A.STOPPING: frozenset({_A.SUCCEEDED, _A.FAILED, _A.CANCELLED, _A.ABORTED, _A.PREEMPTED}),
    _A.SUCCEEDED: frozenset(),
    _A.FAILED: frozenset(),
    _A.CANCELLED: frozenset(),
    _A.ABORTED: frozenset(),
    _A.PREEMPTED: frozenset(),
}
IGNORED = "ignored: the node holds no live rank of that fence"
_ORDER = {each: index for index, each in enumerate(WorkerState)}


def move(attempt: Attempt, to: AttemptState) -> Attempt:
    """Return `attempt` in state `to`. Raises IllegalTransition when NEXT has no such step."""
    if to not in NEXT[attempt.state]:
        raise IllegalTransition(
            f"attempt {attempt.attempt} of job {attempt.job_id} (fence {attempt.fence}): "
            f"{attempt.state.value} -> {to.value} is not allowed"
        )
    return replace(attempt, state=to)


def reserve(draft: Draft, job: Job, placed: tuple[RankPlacement, ...]) -> None:
    """Write a new attempt with its fence, its final placement and its slots, and have its nodes prepare."""
    fence = draft.next_fence()
    workers = tuple(Worker(each.rank) for each in placed)
    attempt = Attempt(fence, job.job_id, job.attempt + 1, _A.RESERVED, placed, workers, draft.now_s)
    for each in placed:
        draft.reserve((each.node_id, each.slot.index), fence)
    draft.put_attempt(move(attempt, _A.PREPARING))
    draft.put_job(
        replace(jobs.move(job, JobState.STARTING, draft.now_s), attempt=attempt.attempt, fence=fence),
    )
    names = ", ".join(dict.fromkeys(each.node_name for each in placed))
    draft.record("job_placed", f"attempt {attempt.attempt}, fence {fence}, on {names}", job_id=job.job_id)
    draft.add_effect(ArmStartDeadline(fence, job.spec.start_timeout_s))
    draft.send_desired(attempt)


def cancel(draft: Draft, job: Job) -> bool:
    """Stop the job's attempt with grace, or have none follow it; False: it fails already, and the job with it."""
    attempt = draft.attempts[job.fence]
    if attempt.state is not _A.STOPPING:
        jobs.start_cancelling(draft, job)
        _stop(draft, attempt, _A.CANCELLED, "cancelled by request", grace_s=float(job.spec.grace_s))
        return True
    if _starts_anew(draft, attempt):
        jobs.start_cancelling(draft, job)
        settle(draft, attempt)
        return True
    return False


def preempt(draft: Draft, attempt: Attempt, trigger: str) -> None:
    """Stop the attempt with grace to make room; its job goes back to the queue. One that is over or stopping is left."""
    if attempt.is_terminal or attempt.state is _A.STOPPING:
        return
    job = draft.jobs[attempt.job_id]
    draft.put_job(jobs.move(job, JobState.PREEMPTING, draft.now_s))
    draft.record("job_preempting", trigger, job_id=job.job_id)
    _stop(draft, attempt, _A.PREEMPTED, trigger, grace_s=float(job.spec.grace_s))


def prepared(draft: Draft, event: events.AttemptPrepared) -> str:
    attempt = _of_node(draft, event.node_id, event.fence)
    if attempt is None or attempt.is_terminal:
        return IGNORED
    retries.prepared(draft, attempt, event.node_id)
    if attempt.state is not _A.PREPARING:
        return "prepared, too late to matter"
    attempt = replace(attempt, prepared_nodes=attempt.prepared_nodes | {event.node_id})
    draft.put_attempt(attempt)
    if not attempt.prepared_nodes.issuperset(attempt.node_ids):
        return "prepared; others are not yet"
    attempt = move(move(attempt, _A.PREPARED), _A.COMMITTED)
    draft.put_attempt(attempt)
    quarantine.clear(draft, attempt.node_ids)
    draft.record("job_committed", "every node is prepared; workers may start", job_id=attempt.job_id)
    draft.add_effect(ArmStartDeadline(attempt.fence, draft.jobs[attempt.job_id].spec.start_timeout_s))
    draft.send_desired(attempt)
    return "every node is prepared"


def refused(draft: Draft, event: events.PrepareRefused) -> str:
    attempt = _of_node(draft, event.node_id, event.fence)
    if attempt is None or attempt.state not in (_A.PREPARING, _A.COMMITTED):
        return IGNORED  # COMMITTED: it lost its preparation since, or its workers can't be told what to do
    reason = f"node {draft.nodes[event.node_id].node_name} could not prepare: {event.message}"
    if event.peer_id in attempt.node_ids:
        retries.not_reached(draft, attempt, event.node_id, event.peer_id, event.message)
    else:
        retries.refused(draft, attempt, event.node_id, event.message, is_nodes=event.is_nodes)
    _stop(draft, attempt, _A.ABORTED, reason, grace_s=0.0)
    return reason


def start_deadline_passed(draft: Draft, event: events.StartDeadlinePassed) -> str:
    attempt = draft.attempts.get(event.fence)
    if attempt is None or attempt.state not in (_A.PREPARING, _A.COMMITTED):
        return "the attempt is past its start"
    within = f"within {draft.jobs[attempt.job_id].spec.start_timeout_s} s (recovery.start_timeout)"
    if attempt.state is _A.PREPARING:
        late = [node_id for node_id in attempt.node_ids if node_id not in attempt.prepared_nodes]
        for node_id in late:
            retries.refused(draft, attempt, node_id, f"not prepared {within}", is_nodes=False)
        reason = f"not prepared {within}: {', '.join(sorted(draft.nodes[each].node_name for each in late))}"
        _stop(draft, attempt, _A.ABORTED, reason, grace_s=0.0)
        return reason
    reason = f"{root_cause.START_TIMEOUT}: not every rank joined {within}"
    _stop(draft, attempt, _A.FAILED, reason, grace_s=0.0)
    return reason


def hang_found(draft: Draft, event: events.HangFound) -> str:
    """Stop an attempt that stands still; the verdict is that of whoever saw where its ranks were."""
    attempt = draft.attempts.get(event.fence)
    if attempt is None or attempt.state is not _A.RUNNING:
        return "the attempt does not run any more"
    reason = f"{root_cause.HANG}: {event.failure.sentence}"
    _stop(draft, replace(attempt, verdict=event.failure), _A.FAILED, reason, grace_s=0.0)
    return reason


def store_listened(draft: Draft, event: events.StoreListened) -> str:
    attempt = _of_node(draft, event.node_id, event.fence)
    if attempt is None or attempt.is_terminal or attempt.store_endpoint == event.endpoint:
        return IGNORED
    draft.put_attempt(replace(attempt, store_endpoint=event.endpoint))
    draft.record("store_listens", event.endpoint, job_id=attempt.job_id)
    draft.send_desired(attempt)
    return "the store listens"


def plan_reported(draft: Draft, event: events.PlanReported) -> str:
    attempt = _of_node(draft, event.node_id, event.fence)
    if attempt is None or attempt.plan == event.plan:
        return IGNORED
    draft.put_attempt(replace(attempt, plan=event.plan))
    draft.record("plan_reported", "rank 0 planned the stages", job_id=attempt.job_id)
    return "planned"


def worker_fact(draft: Draft, event: events.WorkerFact) -> str:
    """Take one fact about one rank into account."""
    attempt = draft.attempts.get(event.fence)
    if attempt is None or not attempt.is_on(event.rank, event.node_id) or attempt.is_terminal:
        return IGNORED
    before = attempt.workers[event.rank]
    worker = _advance(before, event)
    if worker == before:
        return "known already"
    attempt = _with_worker(attempt, worker)
    draft.put_attempt(attempt)
    name, reason = _account(event)
    node_name = attempt.placement[event.rank].node_name
    draft.record(name, f"rank {event.rank}: {reason}", job_id=attempt.job_id, node_name=node_name)
    if attempt.state is _A.PREPARING and worker.has_failed:
        retries.refused(draft, attempt, event.node_id, "its shim was lost before the start", is_nodes=False)
        _stop(draft, attempt, _A.ABORTED, f"node {node_name} lost the attempt's shim before its start", grace_s=0.0)
    else:
        _judge(draft, attempt, (worker,))
    if worker.state is WorkerState.UNKILLABLE:
        settle(draft, draft.attempts[attempt.fence])
    return reason


def emptied(draft: Draft, event: events.AttemptEmptied) -> str:
    """Free the node's slots; ranks that had not ended are gone."""
    attempt = _of_node(draft, event.node_id, event.fence)
    if attempt is None or not draft.release(event.node_id, event.fence):
        return IGNORED
    draft.add_effect(SendDesired(event.node_id))
    node_name = draft.nodes[event.node_id].node_name
    draft.record("attempt_empty", f"fence {event.fence}", job_id=attempt.job_id, node_name=node_name)
    note_drained(draft, event.node_id)
    if attempt.state is _A.PREPARING:
        retries.refused(draft, attempt, event.node_id, "it dropped the attempt before the start", is_nodes=False)
        _stop(draft, attempt, _A.ABORTED, f"node {node_name} dropped the attempt before its start", grace_s=0.0)
    elif attempt.state in (_A.COMMITTED, _A.RUNNING):
        retries.refused(draft, attempt, event.node_id, "it lost the attempt's shim", is_nodes=True)
        lose_ranks(draft, attempt, event.node_id)
    else:
        settle(draft, attempt)
    return "the node holds nothing of the fence"


def note_drained(draft: Draft, node_id: str) -> None:
    """Record the end of a drain once nothing is left on the node."""
    node = draft.nodes[node_id]
    if node.drain is not None and not any(holder == node_id for holder, _slot in draft.reservations):
        draft.record("node_drained", "every attempt has left", node_name=node.node_name)


def lose_ranks(draft: Draft, attempt: Attempt, node_id: str) -> None:
    """Mark the node's ranks that have not ended as LOST."""
    lost = [each.rank for each in attempt.placement if each.node_id == node_id]
    lost = [rank for rank in lost if not attempt.workers[rank].has_ended]
    for rank in lost:
        attempt = _with_worker(attempt, replace(attempt.workers[rank], state=WorkerState.LOST))
    if lost:
        draft.put_attempt(attempt)
        reason = f"ranks {', '.join(map(str, lost))} have neither a shim nor an exit record"
        draft.record("workers_lost", reason, job_id=attempt.job_id, node_name=draft.nodes[node_id].node_name)
        _judge(draft, attempt, tuple(attempt.workers[rank] for rank in lost))


def node_lost(draft: Draft, node_id: str) -> None:
    """Abort what was not started yet, and stop waiting for the node; running workers are left alone."""
    node_name = draft.nodes[node_id].node_name
    for fence in {holder for key, holder in draft.reservations.items() if key[0] == node_id}:
        attempt = draft.attempts[fence]
        if attempt.state is _A.PREPARING:
            _stop(draft, attempt, _A.ABORTED, f"node {node_name} was lost before the start", grace_s=0.0)
        elif attempt.state is _A.STOPPING:
            settle(draft, attempt)


def settle(draft: Draft, attempt: Attempt) -> None:
    """End a STOPPING attempt, and its job with it, once no node has to be waited for."""
    if attempt.state is not _A.STOPPING:
        return
    outcome = attempt.outcome
    assert outcome is not None
    if outcome is _A.FAILED and (verdict := root_cause.judge(attempt, draft.nodes)) != attempt.verdict:
        attempt = replace(attempt, verdict=verdict)
        draft.put_attempt(attempt)
    holders = {key[0] for key, fence in draft.reservations.items() if fence == attempt.fence}
    is_awaited = any(not draft.nodes[node_id].is_gone and not _is_given_up(attempt, node_id) for node_id in holders)
    unknown = _may_run_on(draft, attempt, holders) if _starts_anew(draft, attempt) else []
    _tell_wait(draft, attempt.job_id, [] if is_awaited else unknown)
    if is_awaited or unknown:
        return
    attempt = move(attempt, outcome)
    draft.put_attempt(attempt)
    draft.place_queued()
    job = draft.jobs[attempt.job_id]
    if job.is_terminal:
        draft.record("attempt_ended", f"fence {attempt.fence} {attempt.state.value}", job_id=job.job_id)
    elif job.state is JobState.CANCELLING:
        jobs.end(draft, job.job_id, JobState.CANCELLED, attempt.stop_trigger)
    elif attempt.state is _A.ABORTED:
        jobs.requeue_aborted(draft, job.job_id, attempt.stop_trigger)
    elif attempt.state is _A.PREEMPTED and all(each.has_succeeded for each in attempt.workers):
        jobs.end(draft, job.job_id, JobState.SUCCEEDED, "every rank said done and exited 0 within the grace")
    elif attempt.state is _A.PREEMPTED:
        jobs.requeue_preempted(draft, job.job_id, attempt.stop_trigger)
    else:
        assert attempt.verdict is not None
        jobs.end_or_restart(draft, attempt, attempt.verdict)


def _starts_anew(draft: Draft, attempt: Attempt) -> bool:
    """Return whether the job will have another attempt once this one, which is being stopped, has ended."""
    job = draft.jobs[attempt.job_id]
    if job.is_terminal or job.state is JobState.CANCELLING:
        return False
    if attempt.outcome is not _A.FAILED:
        return attempt.outcome in (_A.ABORTED, _A.PREEMPTED)
    assert attempt.verdict is not None
    return retries.why_final(job, attempt, attempt.verdict, draft.attempts) is None


def _is_given_up(attempt: Attempt, node_id: str) -> bool:
    """Return whether all that the node has left of the attempt are ranks that nothing kills."""
    left = [attempt.workers[each.rank] for each in attempt.placement if each.node_id == node_id]
    left = [each for each in left if not each.has_ended]
    return bool(left) and all(each.state is WorkerState.UNKILLABLE for each in left)


def _may_run_on(draft: Draft, attempt: Attempt, holders: set[str]) -> list[str]:
    """Return the names of nodes that may still run ranks of an attempt whose job is to start anew: LOST ones, and those
    where a rank can't be killed.
    """
    if not attempt.prepared_nodes.issuperset(attempt.node_ids):
        return []  # it was never committed
    left = (each for each in attempt.placement if not attempt.workers[each.rank].has_ended)
    may = (
        each
        for each in left
        if each.node_id in holders
        and (draft.nodes[each.node_id].is_gone or attempt.workers[each.rank].state is WorkerState.UNKILLABLE)
    )
    return list(dict.fromkeys(each.node_name for each in may))


def _tell_wait(draft: Draft, job_id: str, names: list[str]) -> None:
    """Have a job that is to start anew say which nodes, LOST or with a rank that can't be killed, keep it from that."""
    job = draft.jobs[job_id]
    lost = {node.node_name for node in draft.nodes.values() if node.is_gone}
    how = "lost" if lost.issuperset(names) else "lost or can't kill it,"
    told = f"waits for {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} {how} and may still run it: "
    reason = told + "until it reports, or pipectl forget says that it is gone" if names else ""
    if not job.is_terminal and job.pending_reason != reason:
        draft.put_job(replace(job, pending_reason=reason))
        if reason:
            draft.record("job_waits", reason, job_id=job_id)


def _stop(draft: Draft, attempt: Attempt, outcome: AttemptState, trigger: str, *, grace_s: float) -> None:
    attempt = replace(move(attempt, _A.STOPPING), outcome=outcome, stop_trigger=trigger, grace_s=grace_s)
    if outcome is _A.FAILED:
        attempt = replace(attempt, verdict=root_cause.judge(attempt, draft.nodes))
    draft.put_attempt(attempt)
    draft.record("attempt_stopping", trigger, job_id=attempt.job_id)
    draft.send_desired(attempt)
    settle(draft, attempt)


def _judge(draft: Draft, attempt: Attempt, changed: Sequence[Worker]) -> None:
    """Decide what the workers' states mean for the attempt, of which `changed` are new."""
    if attempt.state is _A.STOPPING and attempt.outcome is _A.FAILED:
        if not _is_news(attempt, changed):
            return
        draft.put_attempt(replace(attempt, verdict=root_cause.judge(attempt, draft.nodes)))
        return
    if attempt.state not in (_A.COMMITTED, _A.RUNNING):
        return
    failed = next((each for each in changed if each.has_failed), None)
    if failed is not None:
        _stop(draft, attempt, _A.FAILED, f"rank {failed.rank} failed", grace_s=0.0)
        return
    if attempt.state is _A.COMMITTED and all(each.has_joined for each in chain(changed, attempt.workers)):
        attempt = move(attempt, _A.RUNNING)
        draft.put_attempt(attempt)
        draft.put_job(jobs.move(draft.jobs[attempt.job_id], JobState.RUNNING, draft.now_s))
        draft.record("job_running", f"all {len(attempt.workers)} ranks joined", job_id=attempt.job_id)
    if all(each.has_succeeded for each in chain(changed, attempt.workers)):
        jobs.end(draft, attempt.job_id, JobState.SUCCEEDED, "every rank said done and exited 0")
        _stop(draft, attempt, _A.SUCCEEDED, "every rank succeeded", grace_s=0.0)


def _is_news(attempt: Attempt, changed: Sequence[Worker]) -> bool:
    """Return whether what is new may change the verdict; thousands of ranks that end as they were told to don't."""
    verdict = attempt.verdict
    if verdict is None or verdict.reason is FailureReason.START_TIMEOUT:  # which quotes them
        return True
    return any(each.rank == verdict.rank or not root_cause.was_stopped(each) for each in changed)


def _of_node(draft: Draft, node_id: str, fence: int) -> Attempt | None:
    """Return the attempt of `fence` if a part of it was placed on the node."""
    attempt = draft.attempts.get(fence)
    return attempt if attempt is not None and any(each.node_id == node_id for each in attempt.placement) else None


def _with_worker(attempt: Attempt, worker: Worker) -> Attempt:
    workers = (*attempt.workers[: worker.rank], worker, *attempt.workers[worker.rank + 1 :])
    return replace(attempt, workers=workers)


def _advance(worker: Worker, event: events.WorkerFact) -> Worker:
    """Return `worker` with the fact; states only grow, and what was reported first stands."""
    match event:
        case events.WorkerSpawned():
            return replace(_raise(worker, WorkerState.SPAWNED), pid=event.pid, starttime=event.starttime)
        case events.WorkerJoined():
            return replace(_raise(worker, WorkerState.JOINED), has_joined=True)
        case events.WorkerDone():
            worker = replace(_raise(worker, WorkerState.JOINED), has_joined=True, is_done=True)
            return replace(worker, done_step=event.step, done_loss=event.loss)
        case events.WorkerFailed() if worker.report is None:
            return replace(
                worker, report=event.report, failed_boottime_ns=event.boottime_ns, failed_moment=event.moment
            )
        case events.WorkerExited() if worker.exit_code is None and worker.exit_signal is None:
            return replace(
                worker,
                state=WorkerState.EXITED,
                exit_code=event.code,
                exit_signal=event.signal,
                by_supervisor=event.by_supervisor,
                log_tail=event.log_tail,
                oom_killed=event.oom_killed,
                failed_boottime_ns=worker.failed_boottime_ns or event.boottime_ns,
                failed_moment=worker.failed_moment if worker.failed_boottime_ns else event.moment,
            )
        case events.WorkerUnkillable():
            return _raise(worker, WorkerState.UNKILLABLE)
        case events.WorkerLost():
            return _raise(worker, WorkerState.LOST) if not worker.has_ended else worker
    return worker


def _raise(worker: Worker, state: WorkerState) -> Worker:
    return replace(worker, state=state) if _ORDER[state] > _ORDER[worker.state] else worker


def _account(event: events.WorkerFact) -> tuple[str, str]:
    """Return the event's name and text for the log."""
    match event:
        case events.WorkerSpawned():
            return "worker_spawned", f"pid {event.pid}"
        case events.WorkerJoined():
            return "worker_joined", "joined"
        case events.WorkerDone():
            return "worker_done", f"done after step {event.step}"
        case events.WorkerFailed():
            return "worker_failed", event.report.message
        case events.WorkerExited():
            how = f"signal {event.signal}" if event.signal is not None else f"code {event.code}"
            why = ", out of memory" if event.oom_killed else ", stopped by its node" if event.by_supervisor else ""
            return "worker_exited", f"{how}{why}"
        case events.WorkerUnkillable():
            return "worker_unkillable", "SIGKILL was sent and it has not ended; its slot stays taken until it does"
        case events.WorkerLost():
            return "worker_lost", "neither a shim nor an exit record remains"
