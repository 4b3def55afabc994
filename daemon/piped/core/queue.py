"""The queue: whose turn it is, who waits and why, who has to make room; hold and release.

Higher priority first, then first come. The first job that the cluster could hold but that finds no room is the head: slots
are earmarked for it, others are filled with whatever fits behind it. An earmarked slot goes to nobody behind the head, so
it can only get closer to its turn; of its tenant's quota as much is kept for it. Jobs of a lower priority are preempted
where that lets the head start. A job that the cluster can't hold at all blocks nobody. Called by `machine` alone.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import replace

from piped.core import attempts, earmark, events, jobs, placement, retries
from piped.core.draft import Draft
from piped.core.model import Job, JobState, Node, NodeState, SlotKey
from piped.errors import NotFoundError, WrongStateError


def hold(draft: Draft, event: events.HoldRequested) -> str:
    """Keep a queued job from being placed. Raises WrongStateError for one that is further."""
    job = _job(draft, event.job_id)
    if job.state is JobState.HELD:
        return "it is held already"
    if job.state not in (JobState.QUEUED, JobState.BACKOFF):
        raise WrongStateError(
            f"job {job.job_id} is {job.state.value}: only a queued job can be held; pipectl cancel stops one"
        )
    reason = f"held by {event.who}" + (f": {event.why}" if event.why else "")
    draft.put_job(replace(jobs.move(job, JobState.HELD, draft.now_s), pending_reason=reason))
    draft.record("job_held", reason, job_id=job.job_id)
    draft.place_queued()
    return "held"


def release(draft: Draft, event: events.ReleaseRequested) -> str:
    """Put a held job back where it was in the queue; what nodes refused to prepare is forgotten."""
    job = _job(draft, event.job_id)
    if job.state is not JobState.HELD:
        return "it is not held"
    queued = jobs.move(job, JobState.QUEUED, draft.now_s)
    draft.put_job(replace(queued, pending_reason="waits for the next placement pass", aborts=0, refusals=()))
    draft.record("job_released", f"by {event.who}", job_id=job.job_id)
    draft.place_queued()
    return "released"


def place_queued(draft: Draft, _event: events.PlacementDue) -> str:
    """Give slots to queued jobs whose turn it is, and write every other's reason to wait."""
    live = (draft.jobs[job_id] for job_id in draft.live_names.values())
    queue = sorted((each for each in live if each.state is JobState.QUEUED), key=order)
    shapes: dict[tuple[object, ...], bool] = {}  # whether the cluster could hold a job of that shape
    refused: dict[tuple[object, ...], str] = {}  # why there is no room now; slots only get fewer in one pass
    head: Job | None = None
    opened: dict[tuple[object, ...], tuple[frozenset[str], Mapping[str, Node]]] = {}  # by shape and who refused
    quotas = _Quotas(draft)
    for job in queue:
        kind = placement.shape_of(job.spec)
        refusers = frozenset(each.node_id for each in job.refusals)
        if (kind, refusers) not in opened:
            avoided = retries.avoided(job, draft.nodes)
            opened[kind, refusers] = avoided, _without(avoided, draft.nodes)
        avoided, others = opened[kind, refusers]
        nodes, shape = others.values(), (*kind, avoided)
        if shape not in shapes:
            shapes[shape] = placement.can_ever_fit(job.spec, nodes)
        if shapes[shape] and (over := quotas.refusal(job)):
            _wait(draft, job, over)
            continue
        if shape not in refused:
            taken: Mapping[SlotKey, int] = draft.reservations
            if head is not None:
                taken = ChainMap(dict.fromkeys(head.earmark, 0), dict(draft.reservations))
            placed, refusal = placement.place(job.spec, nodes, taken, draft.wires)
            if placed is not None:
                attempts.reserve(draft, job, placed)
                quotas.take(job)
                continue
            refused[shape] = refusal + _avoiding(job, avoided)
        if not shapes[shape]:
            _wait(draft, job, refused[shape])
        elif head is None:
            head = _lead(draft, job, refused.pop(shape))
            quotas.keep(job)
        else:
            _wait(draft, job, f"waits behind {head.spec.name}")
    for each in queue:  # only the head has one
        job = draft.jobs[each.job_id]
        if job.earmark and (head is None or job.job_id != head.job_id):
            draft.put_job(replace(job, earmark=()))
    return f"{len(queue)} jobs were queued"


class _Quotas:
    """What each tenant holds in one pass. A tenant's jobs don't overtake one that waits for its quota."""

    def __init__(self, draft: Draft) -> None:
        self._limits = draft.quotas
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, str] = {}  # tenant → the job of it that waits first
        self._head: Job | None = None
        if self._limits:
            fences = Counter(draft.reservations.values())
            for fence, count in fences.items():
                self._held[draft.jobs[draft.attempts[fence].job_id].spec.tenant] += count

    def refusal(self, job: Job) -> str:
        """Return why the job may not start now; empty: its tenant has room."""
        tenant, need = job.spec.tenant, job.spec.world_size
        limit = self._limits.get(tenant)
        if limit is None:
            return ""
        if tenant in self._waiting:
            return f"waits behind {self._waiting[tenant]} of tenant {tenant}"
        head = self._head if self._head is not None and self._head.spec.tenant == tenant else None
        kept = head.spec.world_size if head is not None else 0
        if self._held[tenant] + kept + need <= limit:
            return ""
        if need <= limit:
            self._waiting[tenant] = job.spec.name
        told = f"needs {need} slot{'' if need == 1 else 's'}, tenant {tenant} may hold {limit}"
        return f"{told} and holds {self._held[tenant]}" + (f", with {kept} kept for {head.spec.name}" if head else "")

    def take(self, job: Job) -> None:
        """Note that the job got its slots."""
        self._held[job.spec.tenant] += job.spec.world_size

    def keep(self, head: Job) -> None:
        """Note the head of the queue: jobs behind it may not use what it needs of its tenant's quota."""
        self._head = head


def order(job: Job) -> tuple[int, int]:
    """Return what the queue is sorted by."""
    return -job.spec.priority, job.submit_seq


def _lead(draft: Draft, job: Job, refusal: str) -> Job:
    """Make `job` the head of the queue: keep slots for it, and have lower priorities make room if that helps."""
    nodes = _without(retries.avoided(job, draft.nodes), draft.nodes)
    slots, victims = earmark.choose(job, nodes, draft.reservations, draft.attempts, draft.jobs)
    for fence in victims:
        trigger = f"makes room for {job.spec.name} ({job.job_id}), whose priority is higher"
        attempts.preempt(draft, draft.attempts[fence], trigger)
    if draft.jobs[job.job_id].earmark != slots:
        draft.put_job(replace(draft.jobs[job.job_id], earmark=slots))
    _wait(draft, job, f"{refusal}; next in line, {_after(draft, slots)}")
    return draft.jobs[job.job_id]


def _after(draft: Draft, slots: tuple[SlotKey, ...]) -> str:
    """Say what has to happen before the earmarked slots can be used."""
    fences = dict.fromkeys(draft.reservations[key] for key in slots if key in draft.reservations)
    if fences:
        return f"after {', '.join(draft.jobs[draft.attempts[each].job_id].spec.name for each in fences)}"
    nodes = dict.fromkeys(draft.nodes[node_id] for node_id, _slot in slots)
    away = ", ".join(each.node_name for each in nodes if each.state is not NodeState.READY)
    return f"when {away} is connected again"


def _without(avoided: frozenset[str], nodes: Mapping[str, Node]) -> Mapping[str, Node]:
    return {key: each for key, each in nodes.items() if key not in avoided} if avoided else nodes


def _avoiding(job: Job, avoided: frozenset[str]) -> str:
    """Name the nodes that the job keeps away from."""
    names = [f"{each.node_name} (could not prepare it: {each.why})" for each in job.refusals if each.node_id in avoided]
    return f"; not on {', '.join(names)}" if names else ""


def _wait(draft: Draft, job: Job, reason: str) -> None:
    job = draft.jobs[job.job_id]
    if job.aborts and not reason.startswith("waits"):
        times = "once" if job.aborts == 1 else f"{job.aborts} times"
        reason = f"{reason} (it could not be started {times})"
    if job.pending_reason != reason:
        draft.put_job(replace(job, pending_reason=reason))
        draft.record("job_waits", reason, job_id=job.job_id)


def _job(draft: Draft, job_id: str) -> Job:
    job = draft.jobs.get(job_id)
    if job is None:
        raise NotFoundError(f"no job has the id {job_id!r}; see pipectl get jobs")
    return job
