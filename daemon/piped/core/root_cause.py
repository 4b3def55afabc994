"""Which rank failed first, and why: one pure function over what the workers reported.

Called whenever a fact reaches an attempt that stops because of a failure; the last call's answer is final.
1 exits that a supervisor caused count for nothing; 2 a transport error is a victim, it points at its peer; 3 a rank
that the kernel killed for want of memory, then a lost one, outranks exceptions; 4 of the others the earliest by boot
time if they share a host, else the one that victims point at, else the one that failed before every other whatever the
clocks' error, else a tie, which the text says; 5 only victims: the rank at the end of their pointing. A rank that was stopped
before it reported is judged by what a victim quotes of it. A loss that is no number is every rank's: none is blamed.
Who made an attempt hang is `hangs`'s to say, from where the ranks were before they were stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from piped.core.model import Attempt, Failure, FailureReason, Node, Worker, WorkerReport, WorkerState

START_TIMEOUT = "start_timeout"  # the stop_trigger's first word when the start deadline passed
HANG = "hang"  # the same when the ranks stood still


def judge(attempt: Attempt, nodes: Mapping[str, Node]) -> Failure:
    """Return the verdict on `attempt` as far as it is known now."""
    if is_hang(attempt) and attempt.verdict is not None:  # `hangs` saw where the ranks were, their ends tell nothing
        rank = attempt.verdict.rank
        return replace(attempt.verdict, log_tail=attempt.workers[rank].log_tail) if rank >= 0 else attempt.verdict
    attempt = with_quotes(attempt)
    failed = [each for each in attempt.workers if each.has_failed and not was_stopped(each)]
    starved = [each for each in failed if each.oom_killed]
    lost = [each for each in failed if each.state is WorkerState.LOST]
    own = [each for each in failed if each.report is None or not each.report.is_transport]
    victims = [each for each in failed if each.report is not None and each.report.is_transport]
    if starved:
        first, note = _first(attempt, starved, victims)
        return _blame(attempt, first, nodes, note)
    if lost:
        return _blame(attempt, lost[0], nodes)
    if own:
        first, note = _first(attempt, own, victims)
        return _blame(attempt, first, nodes, note)
    if victims:
        return _blame_of_victims(attempt, victims, nodes)
    if attempt.stop_trigger.startswith(START_TIMEOUT):
        return _start_timeout(attempt, nodes)
    return _stopped_from_outside(attempt)


def is_hang(attempt: Attempt) -> bool:
    """Return whether it was stopped because its ranks stood still."""
    return attempt.stop_trigger.startswith(f"{HANG}: ")


def with_quotes(attempt: Attempt) -> Attempt:
    """Return the attempt with what victims quote of ranks that were stopped before they reported, as their reports."""
    told: dict[int, WorkerReport] = {}
    for report in (each.report for each in attempt.workers):
        if report is not None and report.peer_message:
            quote = WorkerReport(report.peer_message, report.peer_traceback, report.step)
            told.setdefault(report.peer_rank, quote)
    workers = attempt.workers
    return replace(attempt, workers=tuple(_with_quote(each, told.get(each.rank)) for each in workers))


def _with_quote(worker: Worker, quote: WorkerReport | None) -> Worker:
    if quote is None or worker.report is not None or worker.state is WorkerState.LOST:
        return worker
    return replace(worker, report=quote, failed_boottime_ns=0, failed_moment=None)  # when, the quote does not tell


def was_stopped(worker: Worker) -> bool:
    """Return whether its end was ordered and it had reported no failure of its own."""
    return worker.by_supervisor and worker.report is None


def _first(attempt: Attempt, own: Sequence[Worker], victims: Sequence[Worker]) -> tuple[Worker, str]:
    """Return the worker to blame, and what has to be said about the certainty."""
    hosts = {attempt.placement[each.rank].node_id for each in own}
    if all(each.report is not None and each.report.is_numeric for each in own):
        return own[0], ""
    if len(own) == 1 or (len(hosts) == 1 and all(each.failed_boottime_ns for each in own)):
        return min(own, key=lambda each: (each.failed_boottime_ns, each.rank)), ""
    if (earliest := _certainly_first(own)) is not None:
        return earliest, ""
    pointed_at = {each.report.peer_rank for each in victims if each.report is not None}
    named = [each for each in own if each.rank in pointed_at]
    if len(named) == 1:
        return named[0], ""
    ranks = " and ".join(str(each.rank) for each in own)
    return own[0], f" (ranks {ranks} failed, on different hosts or untimed; which was first is not known)"


def _certainly_first(own: Sequence[Worker]) -> Worker | None:
    """Return the one that failed before all others on the coordinator's clock, if no error of the offsets can change that."""
    timed = [(each.failed_moment, each) for each in own if each.failed_moment is not None]
    if len(timed) < len(own):
        return None
    first_moment, first = min(timed, key=lambda pair: pair[0].latest_ns)
    later = all(first_moment.latest_ns < moment.earliest_ns for moment, each in timed if each is not first)
    return first if later else None


def _blame(attempt: Attempt, worker: Worker, nodes: Mapping[str, Node], note: str = "") -> Failure:
    place = attempt.placement[worker.rank]
    reason, message = _reason(worker)
    report = worker.report
    if report is None and _is_lost(nodes, place.node_id):  # what it told of itself before, stands
        reason = FailureReason.NODE_LOST
    if reason is FailureReason.NUMERIC and report is not None:  # every rank sees the same sum
        return Failure(reason, f"{message}{note}", step=report.step, traceback=report.traceback)
    return Failure(
        reason=reason,
        message=f"{message}{note}",
        rank=worker.rank,
        node_name=place.node_name,
        stages=place.stages,
        step=report.step if report else -1,
        traceback=report.traceback if report else "",
        log_tail=worker.log_tail,
    )


def _reason(worker: Worker) -> tuple[FailureReason, str]:
    if worker.oom_killed:
        told = f" ({worker.report.message})" if worker.report is not None else ""
        return FailureReason.OOM_KILLED, f"the kernel killed it, or a process of its, for want of memory{told}"
    if worker.report is not None:
        reason = FailureReason.NUMERIC if worker.report.is_numeric else FailureReason.USER_ERROR
        return reason, worker.report.message
    if worker.state is WorkerState.LOST:
        return FailureReason.NODE_LOST, "the worker vanished with its node's shim and left no exit record"
    if worker.exit_signal is not None:
        return FailureReason.SIGNALLED, f"killed by signal {worker.exit_signal}"
    if worker.exit_code == 0:
        return FailureReason.USER_ERROR, "exited 0 before it said that it was done"
    return FailureReason.USER_ERROR, f"exited with code {worker.exit_code}"


def _blame_of_victims(attempt: Attempt, victims: Sequence[Worker], nodes: Mapping[str, Node]) -> Failure:
    """Follow the pointing of the victims to the rank that points at nobody."""
    points = {each.rank: each.report.peer_rank for each in victims if each.report is not None}
    start = min(victims, key=lambda each: (each.failed_boottime_ns, each.rank)).rank
    rank, seen = start, {start}
    while rank in points and points[rank] not in seen and 0 <= points[rank] < len(attempt.workers):
        rank = points[rank]
        seen.add(rank)
    place = attempt.placement[rank]
    if rank in points:  # a circle, or a peer that is not known
        report = attempt.workers[rank].report
        assert report is not None
        return Failure(
            FailureReason.INFRA,
            f"ranks {', '.join(map(str, sorted(points)))} lost contact with each other and no rank failed by itself: "
            f"look at the network between their nodes ({report.message})",
            step=report.step,
        )
    steps = [each.report.step for each in victims if each.report is not None]
    is_lost = _is_lost(nodes, place.node_id)
    return Failure(
        FailureReason.NODE_LOST if is_lost else FailureReason.INFRA,
        f"contact with node {place.node_name} was lost"
        if is_lost
        else "its neighbours lost contact with it, and it reported nothing itself",
        rank,
        place.node_name,
        place.stages,
        step=max(steps, default=-1),
        log_tail="" if is_lost else attempt.workers[rank].log_tail,
    )


def _start_timeout(attempt: Attempt, nodes: Mapping[str, Node]) -> Failure:
    missing = [each for each in attempt.workers if not each.has_joined]
    if not missing:
        return Failure(FailureReason.START_TIMEOUT, attempt.stop_trigger)
    names = "; ".join(_describe_missing(attempt, each) for each in missing)
    told = f"{attempt.stop_trigger.removeprefix(START_TIMEOUT + ': ')}: {names}"
    lost = [each for each in missing if _is_lost(nodes, attempt.placement[each.rank].node_id)]
    blamed = lost or [each for each in missing if not each.pid]
    if not blamed and len(missing) > 1:
        return Failure(FailureReason.START_TIMEOUT, told)  # each may wait for another
    blamed = blamed or missing
    place = attempt.placement[blamed[0].rank]
    reason = FailureReason.NODE_LOST if lost else FailureReason.START_TIMEOUT
    return Failure(reason, told, place.rank, place.node_name, place.stages, log_tail=blamed[0].log_tail)


def _describe_missing(attempt: Attempt, worker: Worker) -> str:
    place = attempt.placement[worker.rank]
    stages = ", ".join(map(str, place.stages))
    state = WorkerState.SPAWNED if worker.pid else WorkerState.PLANNED
    last_line = worker.log_tail.rstrip().rpartition("\n")[2][:200]
    said = f", last log line: {last_line}" if last_line else ""
    return f"rank {worker.rank} on {place.node_name} (stages {stages}, {state.value}{said})"


def _stopped_from_outside(attempt: Attempt) -> Failure:
    stopped = [each for each in attempt.workers if each.by_supervisor]
    if not stopped:
        return Failure(FailureReason.INFRA, attempt.stop_trigger)
    place = attempt.placement[stopped[0].rank]
    return Failure(
        FailureReason.INFRA,
        f"stopped by its own node {place.node_name}, which was not asked to",
        place.rank,
        place.node_name,
        place.stages,
    )


def _is_lost(nodes: Mapping[str, Node], node_id: str) -> bool:
    return node_id not in nodes or nodes[node_id].is_gone
