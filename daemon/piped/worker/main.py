"""`piped worker`: one rank of one attempt, from its first line to its exit status. Started by the shim only.

Dies with its shim (PDEATHSIG). Exit 0 after `done`, 1 after `failed`. Imports torch only once it knows its job.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from piped.worker.link import Link, ShimGone

if TYPE_CHECKING:
    from stagekit.errors import RemoteError

PR_SET_PDEATHSIG = 1
_TRANSPORT_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError")
_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL error")


def main() -> int:
    """Run the rank that the shim assigns; return the exit status."""
    _die_with_parent(os.getppid())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # its handler needs no lock of the interpreter
    link = Link.from_environment(on_gone=lambda: os._exit(1))  # a shim that died before the request for its signal
    try:
        assignment = link.receive("assign")
    except ShimGone:
        return 1
    status = 1
    # Imports and the capture make a million objects and little garbage: collecting it took 12 % of a start's CPU time,
    # not collecting it 8 MiB. `train` turns it on again.
    gc.disable()
    try:
        # torch's C++ part warns of every connection that ends when a rank dies; who died is told by its own words
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from piped import logs
        from piped.worker.train import train

        logs.configure()
        link.send("done", **train(assignment, link))
        status = 0
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            return 130
        text = traceback_of(error)
        print(text, file=sys.stderr, flush=True)
        link.send("failed", **describe_failure(error, text))
    link.flush()
    # Libraries' exit handlers (gloo, inductor's pools) may wait for peers that are gone; nothing is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def describe_failure(error: BaseException, text: str) -> dict[str, Any]:
    """Return the fields of a `failed` message: whose fault it looks like, and the whole traceback."""
    peer_rank, is_transport, is_numeric, step, quote = -1, False, False, -1, ("", "")
    with contextlib.suppress(ImportError):
        from piped.worker.train import NumericError, TrainingError
        from stagekit.errors import PeerError, RemoteError

        if isinstance(error, TrainingError):
            step = error.step
            cause = error.__cause__ or error
            is_numeric = isinstance(cause, NumericError)
            is_transport = isinstance(cause, PeerError | RemoteError) or _is_transport_text(unwrapped(cause))
            if isinstance(cause, PeerError):
                peer_rank = error.global_peer(cause.peer_rank)
            elif isinstance(cause, RemoteError):  # this rank is a victim of that one
                peer_rank, quote = cause.rank, quoted(cause)
            error = cause
    root = error if is_transport else unwrapped(error)
    message = f"{type(root).__name__}: {root}".splitlines()[0][:500]
    return {
        "is_transport": is_transport,
        "is_numeric": is_numeric,
        "peer_rank": peer_rank,
        "message": message,
        "traceback": text[-60_000:],
        "step": step,
        "peer_message": quote[0],
        "peer_traceback": quote[1],
    }


def quoted(error: RemoteError) -> tuple[str, str]:
    """Return message and traceback as that rank itself reports them, unless it is stopped first.

    Both are empty where that rank saw another one's connection break: it is a victim too, and not to blame.
    """
    where = f", chunk {error.chunk}, {error.op}: " if error.op else f"rank {error.rank}: "
    before, _, told = str(error).partition(where)
    told = (told or before).strip() or "no message"
    if _has_transport_sign(told):
        return "", ""
    return told.splitlines()[0][:500], error.traceback[-60_000:]


def unwrapped(error: BaseException) -> BaseException:
    """Return what went wrong, without the wrappers of ours that say where; its own causes belong to it."""
    while type(error).__name__ in ("TrainingError", "StageError") and error.__cause__ is not None:
        error = error.__cause__  # by name: stagekit may be what can't be imported
    return error


def traceback_of(error: BaseException) -> str:
    """Return the traceback of what went wrong, and where it did."""
    root, where, outer = unwrapped(error), "", error
    while outer is not root and outer.__cause__ is not None:
        if type(outer).__name__ == "StageError":
            where = str(outer).partition(f": {type(root).__name__}")[0]
        outer = outer.__cause__
    text = "".join(traceback.format_exception(root))
    return f"{text}raised in {where}\n" if where else text


def _is_transport_text(error: BaseException) -> bool:
    """Collectives raise a plain RuntimeError whose text alone says that a connection broke."""
    return _has_transport_sign(f"{type(error).__name__}: {error}")


def _has_transport_sign(told: str) -> bool:
    return told.startswith(tuple(f"{name}: " for name in _TRANSPORT_TYPES)) and any(sign in told for sign in _SIGNS)


def _die_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)
