"""Job lifecycle: the table of a job's states, and how a job ends, is cancelled or goes back to the queue.

Called by `requests` and `queue`, which accept, hold and cancel jobs, and by `attempts`, which places them and whose ends
become ends of jobs.
"""

from __future__ import annotations

from dataclasses import replace

from piped.core.draft import Draft
from piped.core.model import Failure, FailureReason, Job, JobState
from piped.errors import IllegalTransition

MAX_ABORTS = 3  # attempts in a row that never started before the job is given up

NEXT: dict[JobState, frozenset[JobState]] = {  # what is not in a row is illegal, and raises
    JobState.QUEUED: frozenset({JobState.HELD, JobState.STARTING, JobState.CANCELLED}),
    JobState.HELD: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.STARTING: frozenset(
        {JobState.RUNNING, JobState.QUEUED, JobState.PREEMPTING, JobState.CANCELLING, JobState.FAILED}
    ),
    JobState.RUNNING: frozenset({JobState.PREEMPTING, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.PREEMPTING: frozenset({JobState.QUEUED, JobState.CANCELLING, JobState.SUCCEEDED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def move(job: Job, to: JobState, now_s: float) -> Job:
    """Return `job` in state `to`. Raises IllegalTransition when NEXT has no such step."""
    if to not in NEXT[job.state]:
        raise IllegalTransition(f"job {job.job_id}: {job.state.value} -> {to.value} is not allowed")
    moved = replace(job, state=to, pending_reason="", earmark=())
    if to is JobState.RUNNING and job.started_s is None:
        moved = replace(moved, started_s=now_s)
    if to is JobState.RUNNING:
        moved = replace(moved, aborts=0)
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
    """Queue a job whose attempt never started; after MAX_ABORTS of them it fails."""
    job = replace(draft.jobs[job_id], aborts=draft.jobs[job_id].aborts + 1)
    draft.put_job(job)
    if job.aborts >= MAX_ABORTS:
        message = f"{job.aborts} attempts could not be started; the last one: {reason}"
        end(draft, job_id, JobState.FAILED, message, Failure(FailureReason.INFRA, message))
        return
    draft.put_job(replace(move(job, JobState.QUEUED, draft.now_s), pending_reason=reason))
    draft.record("job_requeued", reason, job_id=job_id)
    draft.place_queued()
