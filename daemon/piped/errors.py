"""Every error that the daemons raise on purpose. The type says who must act.

PipedError
├── UserError                 fix the request
│   ├── SpecError             the job spec: carries the fields and what is wrong with each
│   ├── NotFoundError         no such job, artifact or node
│   ├── WrongStateError       what is asked does not fit the state that the thing is in
│   ├── OutOfRangeError       events that are deleted, or not written yet
│   ├── ConflictError         a name or a request id is taken: carries what holds it
│   └── TooLargeError         over a limit that the text names
├── NodeError                 fix the machine
│   ├── RegistrationRefused   a node may not register: another cluster, a cloned image, a name in use
│   │   └── StoreRolledBack   and the coordinator's store is older than its fleet
│   ├── LeaseLost             a message of a registration that ended; register again
│   └── StateDirHeld          another process holds the state directory: carries its pid
├── TooSlowError              the coordinator could not answer in time; whether it was done is not known
├── UnavailableError          try again later: a node is not connected, the disk is full, the coordinator stops
├── BusyError                 try again later: as much of it goes on as may go on at once
└── BugError                  ours
    ├── IllegalTransition     a state change that no table allows
    └── InvariantBroken       the state contradicts itself

Beside the reason stands the gRPC code that a client gets (the name of a grpc.StatusCode; nothing here imports grpc), and how
long it should wait where asking again may help. `coordinator.status` sends all of it.
"""

from __future__ import annotations

from dataclasses import dataclass


class PipedError(Exception):
    """Base of all errors below. `reason` is the stable word that machines read, `code` that of gRPC."""

    reason = "ERROR"
    code = "UNKNOWN"
    retry_after_s: float | None = None


class UserError(PipedError):
    """The request must change; the text says what, where, the limit and the next step."""

    reason = "USER_ERROR"
    code = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a job spec and what is wrong with it."""

    field: str  # "pipeline.stages"
    description: str


class SpecError(UserError):
    """A job spec that can't run anywhere."""

    reason = "BAD_SPEC"

    def __init__(self, violations: tuple[FieldViolation, ...]) -> None:
        super().__init__("; ".join(f"{each.field}: {each.description}" for each in violations))
        self.violations = violations


class NotFoundError(UserError):
    """Nothing has that id or name."""

    reason = "NOT_FOUND"
    code = "NOT_FOUND"


class WrongStateError(UserError):
    """What is asked does not fit the present state; the text says what does."""

    reason = "WRONG_STATE"
    code = "FAILED_PRECONDITION"


class ConflictError(UserError):
    """The name or the request id is taken by `holder`, a job id."""

    reason = "CONFLICT"
    code = "ALREADY_EXISTS"

    def __init__(self, message: str, *, holder: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.holder, self.hint = holder, hint


class OutOfRangeError(UserError):
    """The events that were asked for are deleted, or far from written."""

    reason = "OUT_OF_RANGE"
    code = "OUT_OF_RANGE"


class TooLargeError(UserError):
    """More bytes than the limit named in the text."""

    reason = "TOO_LARGE"


class NodeError(PipedError):
    """The machine or its daemon must change."""

    reason = "NODE_ERROR"
    code = "FAILED_PRECONDITION"


class RegistrationRefused(NodeError):
    """The node may not register as it is."""

    reason = "REGISTRATION_REFUSED"


class StoreRolledBack(RegistrationRefused):
    """A node of this cluster has seen what this store does not know: an old backup was put in its place."""

    reason = "STORE_ROLLED_BACK"


class LeaseLost(NodeError):
    """A message of a registration that has ended: the node must register again."""

    reason = "LEASE_LOST"
    code = "ABORTED"


class StateDirHeld(NodeError):
    """Another process works on this state directory."""

    reason = "STATE_DIR_HELD"

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class UnavailableError(PipedError):
    """It can't be done now; the same request may succeed later."""

    reason = "UNAVAILABLE"
    code = "UNAVAILABLE"
    retry_after_s = 1.0


class BusyError(PipedError):
    """As much of it goes on as may go on at once; later there may be room."""

    reason = "BUSY"
    code = "RESOURCE_EXHAUSTED"
    retry_after_s = 5.0


class TooSlowError(PipedError):
    """No answer within the limit; whether the request was carried out is not known. Asking again is safe."""

    reason = "TOO_SLOW"
    code = "DEADLINE_EXCEEDED"


class BugError(PipedError):
    """An invariant of ours does not hold."""

    reason = "BUG"
    code = "INTERNAL"


class IllegalTransition(BugError):
    """A state change that no table allows."""

    reason = "ILLEGAL_TRANSITION"


class InvariantBroken(BugError):
    """The state contradicts itself."""

    reason = "INVARIANT_BROKEN"
