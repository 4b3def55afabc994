"""Wire messages to domain data and back, for the coordinator: the one place that knows both.

Nothing is decided here. A message that the wire allows but the domain does not (a fact without a kind) gives None
or an `UNSPECIFIED` value, and its reader decides. Called by `coordinator.services` and `coordinator.sessions`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from pipeapi import jobproto
from pipeapi.v1 import cluster_pb2, jobs_pb2, nodes_pb2, spec_pb2
from piped.core import accounts, events, root_cause
from piped.core.desired import DesiredAttempt, Phase
from piped.core.hangs import Position
from piped.core.model import (
    Attempt,
    AttemptState,
    Failure,
    FailureReason,
    Job,
    JobSpec,
    JobState,
    Moment,
    Node,
    NodeState,
    Progress,
    RankPlacement,
    Record,
    Slot,
    Worker,
    WorkerReport,
    WorkerState,
)

REDACTED = "***"

# Names of wire enums; protobuf takes them where a value is expected.
JOB_STATES = {each: f"JOB_STATE_{each.name}" for each in JobState}
NODE_STATES = {each: f"NODE_STATE_{each.name}" for each in NodeState}
WORKER_STATES = {each: f"WORKER_STATE_{each.name}" for each in WorkerState}
REASONS = {each: f"FAILURE_REASON_{each.name}" for each in FailureReason}
ROLES = {each: f"RANK_ROLE_{each.name}" for each in accounts.Role}
PHASES = {each: f"PHASE_{each.name}" for each in Phase}


def spec_hash(message: spec_pb2.JobSpec) -> str:
    """Return a hash that is equal for equal specs."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def spec_from_proto(message: spec_pb2.JobSpec) -> JobSpec:
    """Return what decisions need, with the whole message as the payload."""
    return JobSpec(
        name=message.name,
        program=message.program,
        stages=message.pipeline.stages,
        stages_per_rank=message.pipeline.stages_per_rank,
        replicas=message.pipeline.replicas,
        schedule=message.pipeline.schedule,
        chunks=message.pipeline.chunks,
        steps=message.train.steps,
        log_every=message.train.log_every,
        device=message.resources.device or "auto",
        slots_per_node=message.resources.slots_per_node,
        grace_s=message.grace_s,
        env=tuple(sorted(message.env.items())),
        source_sha256=message.source_sha256,
        payload=message.SerializeToString(deterministic=True),
        start_timeout_s=message.start_timeout_s,
        json_bytes=jobproto.json_bytes(message),
        stages_of_ranks=tuple(message.pipeline.stages_of_ranks),
        schedule_csv=message.pipeline.schedule_csv,
        placement=message.resources.placement or "spread",
        priority=message.priority,
        node_selector=tuple(sorted(message.resources.node_selector.items())),
        tenant=message.tenant or "default",
        restarts=message.restarts,
        hang_timeout_s=message.hang_timeout_s,
    )


def spec_to_proto(spec: JobSpec, *, redact: bool) -> spec_pb2.JobSpec:
    """Return the spec as it was submitted; with `redact`, without the values of secret variables."""
    message = spec_pb2.JobSpec.FromString(spec.payload)
    if redact:
        for name in message.redacted_env:
            if name in message.env:
                message.env[name] = REDACTED
    return message


def slot_to_proto(slot: Slot) -> cluster_pb2.Slot:
    return cluster_pb2.Slot(index=slot.index, device=slot.device, uuid=slot.uuid)


def registration_from_proto(hello: nodes_pb2.Hello) -> events.NodeRegistered:
    """Return the event that a Hello stands for."""
    return events.NodeRegistered(
        cluster_id=hello.cluster_id,
        node_id=hello.node_id,
        node_name=hello.node_name,
        host_key=hello.host_key,
        version=hello.version,
        highest_epoch=hello.highest_epoch,
        highest_fence=hello.highest_fence,
        data_address=hello.data_address,
        metrics_address=hello.metrics_address,
        slots=tuple(Slot(each.index, each.device, each.uuid) for each in hello.slots),
        labels=tuple(sorted(hello.labels.items())),
        attempts=tuple(
            events.ObservedAttempt(each.fence, each.shim_alive, tuple(each.started_ranks)) for each in hello.attempts
        ),
    )


def wires_from_proto(node_id: str, edges: Iterable[nodes_pb2.Edge]) -> events.WiresMeasured:
    """Return the event that a node's measurements stand for."""
    return events.WiresMeasured(node_id, tuple((each.peer_node_id, each.bytes_per_s) for each in edges))


def fact_from_proto(node_id: str, fact: nodes_pb2.Fact) -> events.Fact | None:
    """Return the fact as an event; None for a kind that this version does not know."""
    fence, rank = fact.fence, fact.rank
    match fact.WhichOneof("fact"):
        case "prepared":
            return events.AttemptPrepared(node_id, fence)
        case "prepare_failed":
            refused = fact.prepare_failed
            return events.PrepareRefused(node_id, fence, refused.message, refused.node_fault, refused.peer_node_id)
        case "spawned":
            return events.WorkerSpawned(node_id, fence, rank, fact.spawned.pid, fact.spawned.starttime)
        case "store_listening":
            return events.StoreListened(node_id, fence, fact.store_listening.endpoint)
        case "joined":
            return events.WorkerJoined(node_id, fence, rank)
        case "planned":
            return events.PlanReported(node_id, fence, fact.planned.plan.SerializeToString(deterministic=True))
        case "worker_failed":
            report, moment = _report_from_proto(fact.worker_failed), _moment_from_proto(fact)
            return events.WorkerFailed(node_id, fence, rank, report, fact.boottime_ns, moment)
        case "worker_done":
            return events.WorkerDone(node_id, fence, rank, fact.worker_done.step, fact.worker_done.loss)
        case "exited":
            exited = fact.exited
            return events.WorkerExited(
                node_id,
                fence,
                rank,
                code=exited.code if exited.HasField("code") else None,
                signal=exited.signal if exited.HasField("signal") else None,
                by_supervisor=exited.by_supervisor,
                log_tail=exited.log_tail,
                boottime_ns=fact.boottime_ns,
                moment=_moment_from_proto(fact),
                oom_killed=exited.oom_killed,
            )
        case "attempt_empty":
            return events.AttemptEmptied(node_id, fence)
        case "unkillable":
            return events.WorkerUnkillable(node_id, fence, rank)
        case "rank_lost":
            return events.WorkerLost(node_id, fence, rank, fact.boottime_ns)
    return None


def _moment_from_proto(fact: nodes_pb2.Fact) -> Moment | None:
    if not fact.HasField("moment"):
        return None
    return Moment(fact.moment.earliest_ns, fact.moment.latest_ns)


def _report_from_proto(failed: nodes_pb2.WorkerFailed) -> WorkerReport:
    return WorkerReport(
        message=failed.message,
        traceback=failed.traceback,
        step=failed.step,
        is_transport=failed.is_transport,
        is_numeric=failed.is_numeric,
        peer_rank=failed.peer_rank,
        peer_message=failed.peer_message,
        peer_traceback=failed.peer_traceback,
    )


def fact_key(fact: nodes_pb2.Fact) -> nodes_pb2.FactKey:
    """Return the key under which the fact is acknowledged: (fence, rank, field number of its kind)."""
    name = fact.WhichOneof("fact")
    kind = nodes_pb2.Fact.DESCRIPTOR.fields_by_name[name].number if name else 0
    return nodes_pb2.FactKey(fence=fact.fence, rank=fact.rank if fact.HasField("rank") else None, kind=kind)


def desired_to_proto(desired: DesiredAttempt) -> nodes_pb2.DesiredAttempt:
    """Return an attempt as a node shall have it, with secrets: it goes to nodes only."""
    attempt = desired.attempt
    return nodes_pb2.DesiredAttempt(
        job_id=attempt.job_id,
        attempt=attempt.attempt,
        fence=attempt.fence,
        phase=PHASES[desired.phase],
        spec=spec_to_proto(desired.spec, redact=False),
        ranks=[_rank_placement(each) for each in attempt.placement],
        store_endpoint=attempt.store_endpoint,
        grace_s=attempt.grace_s,
        stop_trigger=attempt.stop_trigger,
        dump_stacks=root_cause.is_hang(attempt),
    )


def _rank_placement(placed: RankPlacement) -> nodes_pb2.RankPlacement:
    return nodes_pb2.RankPlacement(
        rank=placed.rank,
        replica=placed.replica,
        stages=placed.stages,
        node_id=placed.node_id,
        node_name=placed.node_name,
        slot=slot_to_proto(placed.slot),
    )


def job_to_proto(job: Job, attempt: Attempt | None, progress: Mapping[int, Progress]) -> jobs_pb2.Job:
    """Return what clients see of a job. `progress` is by rank, of the newest attempt."""
    message = jobs_pb2.Job(
        job_id=job.job_id,
        name=job.spec.name,
        state=JOB_STATES[job.state],
        pending_reason=job.pending_reason,
        spec=spec_to_proto(job.spec, redact=True),
        attempt=job.attempt,
        fence=job.fence,
        submitted_at=timestamp(job.submitted_s),
        event_seq=job.event_seq,
        restarts_used=job.restarts,
    )
    if job.backoff is not None:
        message.retry_at.CopyFrom(timestamp(job.backoff.at_s + job.backoff.for_s))
    if job.started_s is not None:
        message.started_at.CopyFrom(timestamp(job.started_s))
    if job.finished_s is not None:
        message.finished_at.CopyFrom(timestamp(job.finished_s))
    failure = job.failure
    if attempt is not None:
        for placed, worker in zip(attempt.placement, attempt.workers, strict=True):
            step = progress[worker.rank].step if worker.rank in progress else 0
            message.workers.append(_worker_to_proto(placed, worker, max(step, worker.done_step)))
        if attempt.plan:
            message.plan.ParseFromString(attempt.plan)
        reporter = reporting_rank(job.spec, attempt)
        if reporter in progress:
            message.progress.CopyFrom(_progress_to_proto(progress[reporter]))
        if (done := attempt.workers[reporter]).is_done:  # newer than its last beat, and known after a restart
            message.progress.step, message.progress.steps = done.done_step, job.spec.steps
            message.progress.loss = done.done_loss
        if attempt.outcome is AttemptState.FAILED:
            failure = failure or attempt.verdict
    if failure is not None:
        message.failure.CopyFrom(_failure_to_proto(failure))
    return message


def progress_from_proto(message: jobs_pb2.Progress) -> Progress:
    return Progress(message.step, message.steps, message.loss, message.tokens_per_s, message.step_s)


def position_from_proto(message: nodes_pb2.Position) -> Position:
    return Position(
        step=message.step,
        section=message.section,
        action=message.action,
        waiting_on=tuple(message.waiting_on),
        waits_for_all=message.waiting_on_all,
        age_s=message.age_s,
        silent_s=message.silent_s,
        longest_step_s=message.longest_step_s,
    )


def _progress_to_proto(progress: Progress) -> jobs_pb2.Progress:
    return jobs_pb2.Progress(
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        tokens_per_s=progress.tokens_per_s,
        step_s=progress.step_s,
    )


def reporting_rank(spec: JobSpec, attempt: Attempt) -> int:
    """Return the rank that owns the last stage of replica 0: it speaks for the job."""
    last = (each.rank for each in attempt.placement if each.replica == 0 and spec.stages - 1 in each.stages)
    return next(last)


def _worker_to_proto(placed: RankPlacement, worker: Worker, step: int) -> jobs_pb2.Worker:
    return jobs_pb2.Worker(
        rank=placed.rank,
        replica=placed.replica,
        stages=placed.stages,
        node_id=placed.node_id,
        node_name=placed.node_name,
        device=placed.slot.device,
        slot=placed.slot.index,
        state=WORKER_STATES[worker.state],
        pid=worker.pid,
        exit_code=worker.exit_code,
        exit_signal=worker.exit_signal,
        step=step,
    )


def _failure_to_proto(failure: Failure) -> jobs_pb2.Failure:
    return jobs_pb2.Failure(
        reason=REASONS[failure.reason],
        rank=failure.rank,
        node_name=failure.node_name,
        stages=failure.stages,
        step=failure.step,
        message=failure.message,
        traceback=failure.traceback,
        log_tail=failure.log_tail,
    )


def report_to_proto(attempt: Attempt) -> jobs_pb2.FailureReportResponse:
    """Return what is known of the end of an attempt that stops or has stopped."""
    assert attempt.outcome is not None
    message = jobs_pb2.FailureReportResponse(
        attempt=attempt.attempt,
        fence=attempt.fence,
        stop_trigger=attempt.stop_trigger,
        outcome=attempt.outcome.value,
        final=attempt.is_terminal,
    )
    if attempt.verdict is not None:
        message.failure.CopyFrom(_failure_to_proto(attempt.verdict))
    for placed, account in zip(attempt.placement, accounts.of(attempt), strict=True):
        message.ranks.add(
            rank=account.rank,
            node_name=placed.node_name,
            stages=placed.stages,
            role=ROLES[account.role],
            message=account.message,
            peer_rank=account.peer_rank,
            step=account.step,
        )
    return message


def node_to_proto(node: Node, held: Iterable[tuple[Attempt, str]], *, lease_age_s: float) -> cluster_pb2.Node:
    """Return what clients see of a node. `held` are the attempts that hold its slots, each with its job's name."""
    message = cluster_pb2.Node(
        node_id=node.node_id,
        node_name=node.node_name,
        state=NODE_STATES[node.state],
        incarnation=node.incarnation,
        version=node.version,
        data_address=node.data_address,
        metrics_address=node.metrics_address,
        slots=[slot_to_proto(each) for each in node.slots],
        lease_age_s=lease_age_s,
        labels=dict(node.labels),
        strikes=len(node.strikes),
    )
    for attempt, name in held:
        num_slots = sum(each.node_id == node.node_id for each in attempt.placement)
        state = attempt.state.value
        message.attempts.add(fence=attempt.fence, job_id=attempt.job_id, name=name, state=state, slots=num_slots)
        message.slots_used += num_slots
    if (cordon := node.cordon) is not None:
        message.cordon.CopyFrom(cluster_pb2.Cordon(who=cordon.who, why=cordon.why, at=timestamp(cordon.at_s)))
    if (away := node.quarantine) is not None:
        at, until = timestamp(away.at_s), timestamp(away.at_s + away.for_s)
        message.quarantine.CopyFrom(cluster_pb2.Quarantine(why=away.why, at=at, until=until))
    if (drain := node.drain) is not None:
        at, deadline = timestamp(drain.at_s), timestamp(drain.at_s + drain.within_s)
        message.drain.CopyFrom(cluster_pb2.Drain(who=drain.who, why=drain.why, at=at, deadline=deadline))
    return message


def record_to_proto(record: Record) -> jobs_pb2.Event:
    return jobs_pb2.Event(
        event_seq=record.event_seq,
        at=timestamp(record.at_s),
        job_id=record.job_id,
        node_name=record.node_name,
        name=record.name,
        reason=record.reason,
    )


def timestamp(at_s: float) -> Timestamp:
    """Return Unix seconds as a wire timestamp."""
    message = Timestamp()
    message.FromNanoseconds(int(at_s * 1e9))
    return message
