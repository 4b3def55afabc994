"""Job lifecycle: the table of a job's states, and how a job ends, is cancelled or goes back to the queue.

`retries` says whether another attempt follows a bad end. Called by `requests` and `queue`, which accept, hold and cancel jobs, and by `attempts`, which places them and whose ends
become ends of jobs.
"""

from __future__ import annotations

from dataclasses import replace

from piped.core import events, retries
from piped.core.draft import Draft
from piped.core.effects import ArmBackoffEnd
from piped.core.model import Attempt, Backoff, Failure, FailureReason, Job, JobState
from piped.errors import IllegalTransition

_S = JobState
NEXT: dict[JobState, frozenset[JobState]] = {  # what is not in a row is illegal, and raises
    _S.QUEUED: frozenset({_S.HELD, _S.STARTING, _S.CANCELLED}),
    _S.HELD: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.BACKOFF: frozenset({_S.QUEUED, _S.HELD, _S.CANCELLED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.QUEUED, _S.BACKOFF, _S.PREEMPTING, _S.CANCELLING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.QUEUED, _S.BACKOFF, _S.PREEMPTING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.PREEMPTING: frozenset({_S.QUEUED, _S.CANCELLING, _S.SUCCEEDED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


def move(job: Job, to: JobState, now_s: float) -> Job:
    """Return `job` in state `to`. Raises IllegalTransition when NEXT has no such step."""
    if to not in NEXT[job.state]:
        raise IllegalTransition(f"job {job.job_id}: {job.state.value} -> {to.value} is not allowed")
    moved = replace(job, state=to, pending_reason="", earmark=(), backoff=None)
    if to is JobState.RUNNING and job.started_s is None:
        moved = replace(moved, started_s=now_s)
    if to is JobState.RUNNING:
        moved = replace(moved, aborts=0, refusals=())
    return replace(moved, finished_s=now_s) if moved.is_terminal else moved


def start_cancelling(draft: Draft, job: Job) -> None:
    draft.put_job(move(job, JobState.CANCELLING, draft.now_s))
    draft.record("job_cancelling", "cancel was requested", job_id=job.job_id)


def end(draft: Draft, job_id: str, to: JobState, reason: str, failure: Failure | None = None) -> None:
    """Bring the job to the terminal state `to`."""
    draft.put_job(replace(move(draft.jobs[job_id], to, draft.now_s), failure=failure))
    draft.record(f"job_{to.value}", reason, job_id=job_id)
    draft.place_queued()


def requeue_preempted(draft: Draft, job_id: str, reason: str) -> None:
    """Queue a job that had to make room; that is charged to nobody."""
    draft.put_job(replace(move(draft.jobs[job_id], JobState.QUEUED, draft.now_s), pending_reason=reason))
    draft.record("job_requeued", reason, job_id=job_id)
    draft.place_queued()


def requeue_aborted(draft: Draft, job_id: str, reason: str) -> None:
    """Have a job whose attempt never started tried again, unless no node is left that could start it."""
    job = replace(draft.jobs[job_id], aborts=draft.jobs[job_id].aborts + 1)
    draft.put_job(job)
    if retries.is_given_up(job, draft.nodes.values()):
        message = f"{job.aborts} attempts could not be started; {retries.told(job)}"
        end(draft, job_id, JobState.FAILED, message, Failure(FailureReason.INFRA, message))
        return
    _wait(draft, job, retries.delay_s(job.aborts), reason)


def end_or_restart(draft: Draft, attempt: Attempt, verdict: Failure) -> None:
    """Fail the job for `verdict` on its attempt, or have it tried again."""
    job = draft.jobs[attempt.job_id]
    final = retries.why_final(job, attempt, verdict, draft.attempts)
    if final is not None:
        if final:
            verdict = replace(verdict, message=f"{verdict.message} (not tried again: {final})")
        end(draft, job.job_id, JobState.FAILED, verdict.sentence, verdict)
        return
    times = len(retries.earlier_failures(job, attempt, draft.attempts)) + 1
    if verdict.reason not in retries.FREE:
        job = replace(job, restarts=job.restarts + 1)
        draft.put_job(job)
    _wait(draft, job, retries.delay_s(times), f"attempt {attempt.attempt} failed: {verdict.sentence}")


def backoff_ended(draft: Draft, event: events.BackoffEnded) -> str:
    """Queue the job for its next attempt."""
    job = draft.jobs.get(event.job_id)
    if job is None or job.backoff is None or job.backoff.at_s != event.at_s:
        return "it waits no longer, or anew"
    draft.put_job(replace(move(job, JobState.QUEUED, draft.now_s), pending_reason=job.pending_reason))
    draft.record("job_requeued", f"for attempt {job.attempt + 1}", job_id=job.job_id)
    draft.place_queued()
    return "queued"


def _wait(draft: Draft, job: Job, for_s: float, reason: str) -> None:
    """Queue the job, at once or after `for_s`."""
    if not for_s:
        draft.put_job(replace(move(job, JobState.QUEUED, draft.now_s), pending_reason=reason))
        draft.record("job_requeued", reason, job_id=job.job_id)
        draft.place_queued()
        return
    waiting = replace(move(job, JobState.BACKOFF, draft.now_s), backoff=Backoff(draft.now_s, for_s))
    draft.put_job(replace(waiting, pending_reason=reason))
    draft.record("job_backoff", f"attempt {job.attempt + 1} in {for_s:g} s: {reason}", job_id=job.job_id)
    draft.add_effect(ArmBackoffEnd(job.job_id, draft.now_s, for_s))
