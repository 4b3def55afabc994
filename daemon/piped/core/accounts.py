"""What each rank's part in a failure was: the report behind a verdict.

The verdict itself is `root_cause`'s. Called by the job service for FailureReport.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from piped.core.model import Attempt, Worker, WorkerState
from piped.core.root_cause import with_quotes


class Role(StrEnum):
    ROOT = "root"  # the verdict blames it
    FAILED = "failed"  # by itself, but not first, or which was first is not known
    VICTIM = "victim"  # it lost contact with `peer_rank`
    LOST = "lost"  # neither a shim nor an exit record remains
    STOPPED = "stopped"  # its node ended it after the failure
    SUCCEEDED = "succeeded"
    UNFINISHED = "unfinished"  # not started, or not known to have ended


@dataclass(frozen=True, slots=True)
class RankAccount:
    """One rank's part; `peer_rank` is -1 unless it is a victim that knows of whom."""

    rank: int
    role: Role
    message: str
    peer_rank: int = -1
    step: int = -1


def of(attempt: Attempt) -> tuple[RankAccount, ...]:
    """Return the part of every rank, by rank."""
    return tuple(_account(attempt, each) for each in with_quotes(attempt).workers)


def _account(attempt: Attempt, worker: Worker) -> RankAccount:
    report = worker.report
    role = _role(attempt, worker)
    peer_rank = report.peer_rank if report is not None and report.is_transport else -1
    return RankAccount(worker.rank, role, _message(worker), peer_rank, report.step if report else -1)


def _role(attempt: Attempt, worker: Worker) -> Role:
    if attempt.verdict is not None and attempt.verdict.rank == worker.rank:
        return Role.ROOT
    if worker.state is WorkerState.LOST:
        return Role.LOST
    if worker.report is not None:
        return Role.VICTIM if worker.report.is_transport else Role.FAILED
    if worker.oom_killed:
        return Role.FAILED
    if worker.by_supervisor:
        return Role.STOPPED
    if worker.has_succeeded:
        return Role.SUCCEEDED
    return Role.FAILED if worker.has_failed else Role.UNFINISHED


def _message(worker: Worker) -> str:
    if worker.oom_killed:
        return "killed for want of memory"
    if worker.report is not None:
        return worker.report.message
    if worker.state is WorkerState.LOST:
        return "vanished without an exit record"
    if worker.exit_signal is not None:
        return f"signal {worker.exit_signal}"
    return f"exit code {worker.exit_code}" if worker.exit_code is not None else worker.state.value
