"""What clients ask: submit, cancel; and the queue of what they asked for.

The queue is first in, first out: a job that the cluster could hold is not overtaken, one that it can't hold at all
blocks nobody. Called by `machine` alone.
"""

from __future__ import annotations

from dataclasses import replace

from piped.core import attempts, events, jobs, placement
from piped.core.draft import Draft
from piped.core.model import Artifact, Job, JobState, Submission
from piped.errors import ConflictError, NotFoundError


def submit(draft: Draft, event: events.JobSubmitted) -> str:
    """Accept the job, or find the earlier one of the same request.

    Raises ConflictError when the request id came with another spec before, or a live job has the name.
    """
    earlier = draft.submissions.get(event.request_id)
    if earlier is not None:
        if earlier.spec_hash != event.spec_hash:
            raise ConflictError(
                f"request id {event.request_id!r} was used for job {earlier.job_id} with another spec",
                holder=earlier.job_id,
                hint="send a changed spec under a new request id",
            )
        return f"the request was accepted before as job {earlier.job_id}"
    for job in draft.jobs.values():
        if job.spec.name == event.spec.name and not job.is_terminal:
            raise ConflictError(
                f"a live job is called {event.spec.name!r}: {job.job_id} ({job.state.value})",
                holder=job.job_id,
                hint=f"cancel it (pipectl cancel {job.job_id}) or choose another name",
            )
    draft.put_submission(Submission(event.request_id, event.spec_hash, event.job_id, draft.now_s))
    draft.put_job(
        Job(
            event.job_id,
            JobState.QUEUED,
            event.spec,
            submit_seq=draft.event_seq + 1,
            submitted_s=draft.now_s,
            pending_reason="waits for the next placement pass",
        )
    )
    draft.record("job_submitted", f"{event.spec.name}: {event.spec.world_size} ranks", job_id=event.job_id)
    draft.has_queue_changed = True
    return "accepted"


def cancel(draft: Draft, event: events.CancelRequested) -> str:
    """Bring the job to CANCELLED; a second request, or one for an ended job, changes nothing."""
    job = draft.jobs.get(event.job_id)
    if job is None:
        raise NotFoundError(f"no job has the id {event.job_id!r}; see pipectl get jobs")
    if job.is_terminal or job.state is JobState.CANCELLING:
        return f"the job is {job.state.value} already"
    if job.state is JobState.QUEUED:
        draft.put_job(jobs.move(job, JobState.CANCELLED, draft.now_s))
        draft.record("job_cancelled", "cancelled while queued", job_id=job.job_id)
        draft.has_queue_changed = True
        return "cancelled"
    if not attempts.cancel(draft, job):
        return "its attempt has failed and is being stopped"
    return "its nodes were told to stop"


def place_queued(draft: Draft) -> None:
    """Give slots to queued jobs in the order of submission, and write every other's reason to wait."""
    first_waiting: Job | None = None
    for job in sorted((each for each in draft.jobs.values() if each.state is JobState.QUEUED), key=_order):
        if first_waiting is not None and placement.can_ever_fit(job.spec, draft.nodes.values()):
            _wait(draft, job, f"waits behind {first_waiting.spec.name} ({first_waiting.pending_reason})")
            continue
        placed, reason = placement.place(job.spec, draft.nodes.values(), draft.reservations)
        if placed is not None:
            attempts.reserve(draft, draft.jobs[job.job_id], placed)
            continue
        _wait(draft, job, reason)
        if placement.can_ever_fit(job.spec, draft.nodes.values()):
            first_waiting = first_waiting or draft.jobs[job.job_id]


def store_artifact(draft: Draft, event: events.ArtifactStored) -> str:
    """Note a file that is in the artifact store."""
    draft.put_artifact(Artifact(event.sha256, event.size_bytes, draft.now_s))
    draft.record("artifact_stored", f"{event.sha256}: {event.size_bytes} bytes")
    return "stored"


def _order(job: Job) -> int:
    return job.submit_seq


def _wait(draft: Draft, job: Job, reason: str) -> None:
    if job.aborts and not reason.startswith("waits"):
        reason = f"{reason} (attempt {job.attempt} could not be started)"
    if draft.jobs[job.job_id].pending_reason != reason:
        draft.put_job(replace(draft.jobs[job.job_id], pending_reason=reason))
        draft.record("job_waits", reason, job_id=job.job_id)
