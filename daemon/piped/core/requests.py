"""What clients ask: submit and cancel a job, keep an artifact. Called by `machine` alone."""

from __future__ import annotations

from piped.core import attempts, events, jobs
from piped.core.draft import Draft
from piped.core.model import Artifact, Job, JobState, Submission
from piped.errors import ConflictError, NotFoundError


def submit(draft: Draft, event: events.JobSubmitted) -> str:
    """Accept the job, or find the earlier one of the same request.

    Names and request ids are a tenant's own. Raises ConflictError when the request id came with another spec before, or a
    live job has the name.
    """
    tenant = event.spec.tenant
    earlier = draft.submissions.get((tenant, event.request_id))
    if earlier is not None:
        if earlier.spec_hash != event.spec_hash:
            raise ConflictError(
                f"request id {event.request_id!r} was used for job {earlier.job_id} with another spec",
                holder=earlier.job_id,
                hint="send a changed spec under a new request id",
            )
        return f"the request was accepted before as job {earlier.job_id}"
    holder = draft.live_names.get(event.spec.key)
    if holder is not None:
        raise ConflictError(
            f"a live job is called {event.spec.name!r}: {holder} ({draft.jobs[holder].state.value})",
            holder=holder,
            hint=f"cancel it (pipectl cancel {holder}) or choose another name",
        )
    draft.put_submission(Submission(tenant, event.request_id, event.spec_hash, event.job_id, draft.now_s))
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
    draft.place_queued()
    return "accepted"


def cancel(draft: Draft, event: events.CancelRequested) -> str:
    """Bring the job to CANCELLED; a second request, or one for an ended job, changes nothing."""
    job = draft.jobs.get(event.job_id)
    if job is None:
        raise NotFoundError(f"no job has the id {event.job_id!r}; see pipectl get jobs")
    if job.is_terminal or job.state is JobState.CANCELLING:
        return f"the job is {job.state.value} already"
    if job.state in (JobState.QUEUED, JobState.HELD, JobState.BACKOFF):
        draft.put_job(jobs.move(job, JobState.CANCELLED, draft.now_s))
        draft.record("job_cancelled", f"cancelled while {job.state.value}", job_id=job.job_id)
        draft.place_queued()
        return "cancelled"
    if not attempts.cancel(draft, job):
        return "its attempt has failed and is being stopped"
    return "its nodes were told to stop"


def store_artifact(draft: Draft, event: events.ArtifactStored) -> str:
    """Note a file that is in the artifact store."""
    draft.put_artifact(Artifact(event.sha256, event.size_bytes, draft.now_s))
    draft.record("artifact_stored", f"{event.sha256}: {event.size_bytes} bytes")
    return "stored"
