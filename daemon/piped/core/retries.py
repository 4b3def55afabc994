"""Whether an attempt that ended badly is followed by another, how long that waits, and which nodes it leaves out.

A restart begins at step 0: what an attempt trained is lost with it. Failures that are not the job's (a node or a network was
lost) are always followed by another attempt; others are charged to the job's `recovery.restarts`. Attempts that could not
be started are not charged: the job is given up only when no node is left that has not refused it.
Called by `attempts` and `jobs` (what comes next), `queue` and the job service (nodes left out).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from piped.core import placement, quarantine
from piped.core.draft import Draft
from piped.core.model import Attempt, AttemptState, Failure, FailureReason, Job, Node, Refusal

FREE = frozenset({FailureReason.NODE_LOST, FailureReason.INFRA})  # charged to nobody
MIN_ABORTS = 3  # attempts that could not be started before the job is given up
MAX_REFUSERS = 8  # nodes that refused the job while none could prepare it: more would say the same
MAX_DELAY_S = 60.0
MAX_LOSSES = 5  # of the node of one and the same rank, before the job is given up
MAX_UNKNOWN = 2  # failures of one rank of which no step is known


def delay_s(times: int) -> float:
    """Return how long to wait after so many bad ends in a row: 0, 1, 2, 4, … 60 s."""
    return 0.0 if times <= 1 else min(MAX_DELAY_S, 2.0 ** (min(times, 99) - 2))


def earlier_failures(job: Job, attempt: Attempt, attempts: Mapping[int, Attempt]) -> list[Failure]:
    """Return the verdicts on the job's failed attempts before `attempt`."""
    failed = (each for each in attempts.values() if each.job_id == job.job_id and each.state is AttemptState.FAILED)
    return [each.verdict for each in failed if each.fence < attempt.fence and each.verdict is not None]


def why_final(job: Job, attempt: Attempt, verdict: Failure, attempts: Mapping[int, Attempt]) -> str | None:
    """Return why no attempt follows a failed one, in words that may be empty; None: another one follows."""
    times = sum(_is_same(verdict, each) for each in earlier_failures(job, attempt, attempts))
    if times >= _most_alike(verdict):
        return (
            "an earlier attempt failed in the same way"
            if times == 1
            else f"{times} earlier attempts failed in the same way"
        )
    if verdict.reason in FREE:
        return None
    if not job.spec.restarts:
        return ""
    if _is_early(attempt, verdict):
        return "it failed before its first step had ended, which another attempt would do, too"
    if job.restarts >= job.spec.restarts:
        return f"{job.restarts} of {job.spec.restarts} restarts are used (recovery.restarts)"
    return None


def refused(draft: Draft, attempt: Attempt, node_id: str, why: str, *, is_nodes: bool) -> None:
    """Note that the node could not prepare the job: a strike if it says so itself, or others have prepared the attempt.

    Else it may be the job's own fault, which is known once another node has prepared it.
    """
    is_nodes = is_nodes or bool(attempt.prepared_nodes - {node_id})
    _note(draft, attempt.job_id, Refusal(node_id, draft.nodes[node_id].node_name, why, is_nodes))
    if is_nodes:
        quarantine.strike(draft, node_id, attempt.job_id, why)


def not_reached(draft: Draft, attempt: Attempt, caller_id: str, peer_id: str, why: str) -> None:
    """Note that one node of the attempt could not call another: either may be to blame.

    The next attempt leaves out the one that was called. It is the caller's fault once it could not reach a second one, or one
    that has prepared; that of the one called once a second caller says so.
    """
    job = draft.jobs[attempt.job_id]
    if peer_id in attempt.prepared_nodes or any(
        each.by == caller_id and each.node_id != peer_id for each in job.refusals
    ):
        draft.put_job(replace(job, refusals=tuple(each for each in job.refusals if each.by != caller_id)))
        refused(draft, attempt, caller_id, why, is_nodes=True)
    elif any(each.node_id == peer_id and each.by not in ("", caller_id) for each in job.refusals):
        refused(draft, attempt, peer_id, why, is_nodes=True)
    else:
        suspect = Refusal(peer_id, draft.nodes[peer_id].node_name, why, is_nodes=False, by=caller_id)
        _note(draft, job.job_id, suspect)


def _note(draft: Draft, job_id: str, refusal: Refusal) -> None:
    """Keep the newest refusal of each node."""
    job = draft.jobs[job_id]
    others = tuple(each for each in job.refusals if each.node_id != refusal.node_id)
    draft.put_job(replace(job, refusals=(*others, refusal)))


def prepared(draft: Draft, attempt: Attempt, node_id: str) -> None:
    """A node has prepared the job: the others that could not are to blame themselves."""
    job = draft.jobs[attempt.job_id]
    blamed = [each for each in job.refusals if not each.is_nodes and not each.by and each.node_id != node_id]
    if not blamed:
        return
    refusals = tuple(replace(each, is_nodes=each.is_nodes or each in blamed) for each in job.refusals)
    draft.put_job(replace(job, refusals=refusals))
    for each in blamed:
        quarantine.strike(draft, each.node_id, job.job_id, each.why)


def is_given_up(job: Job, nodes: Iterable[Node]) -> bool:
    """Return whether a job that could not be started `aborts` times is not tried again."""
    if job.aborts < MIN_ABORTS or not job.refusals:
        return False
    if sum(not each.is_nodes for each in job.refusals) >= MAX_REFUSERS:
        return True
    return not placement.can_ever_fit(job.spec, _others(job, nodes))


def avoided(job: Job, nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the node_ids that the job keeps away from: those that refused it, while the others could hold it."""
    refusers = frozenset(each.node_id for each in job.refusals if each.node_id in nodes)
    return refusers if refusers and placement.can_ever_fit(job.spec, _others(job, nodes.values())) else frozenset()


def told(job: Job) -> str:
    """Return every refusal of the job in words."""
    return "; ".join(f"node {each.node_name} could not prepare: {each.why}" for each in job.refusals)


def _others(job: Job, nodes: Iterable[Node]) -> list[Node]:
    refusers = {each.node_id for each in job.refusals}
    return [each for each in nodes if each.node_id not in refusers]


def _is_same(one: Failure, other: Failure) -> bool:
    """Return whether the same rank failed in the same way in the same step."""
    return (one.reason, one.rank, one.step) == (other.reason, other.rank, other.step)


def _most_alike(verdict: Failure) -> int:
    """Return how many earlier failures like this one are too many; one that told no step may have been in any."""
    if verdict.reason is FailureReason.NODE_LOST:
        return MAX_LOSSES
    return 1 if verdict.step >= 0 else MAX_UNKNOWN


def _is_early(attempt: Attempt, verdict: Failure) -> bool:
    """Return whether the user's code failed before it had finished a step."""
    if verdict.reason is not FailureReason.USER_ERROR or verdict.rank < 0:
        return False
    worker = attempt.workers[verdict.rank]
    return not worker.has_joined or (worker.report is not None and verdict.step <= 0)
