"""PID 1 of a container: keeps one daemon running, reaps every orphan. Standard library only.

A daemon that exits is started again in place, so its shims and workers, children of this process by then, run on.
SIGTERM and SIGINT are passed on to the daemon; when it has left, so does this process. A daemon that refuses its
configuration (78) is not started again.

Usage: init.py COMMAND [ARGUMENT ...] of `piped`, e.g. init.py node --config /etc/piped/node.toml
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

RESTART_S = 1.0
EXIT_CONFIG = 78
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h; PID 1 is one anyway


def main(arguments: Sequence[str]) -> int:
    """Run `piped` with `arguments` until told to end; return its last exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    argv = [sys.executable, "-m", "piped", *arguments]
    is_leaving = False
    while True:
        daemon = os.posix_spawn(sys.executable, argv, os.environ, setsigmask=())
        status: int | None = None
        while status is None:
            number = signal.sigwait(handled)
            if number != signal.SIGCHLD:
                is_leaving = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(daemon, signal.SIGTERM)
            status = _reap(daemon)
        code = os.waitstatus_to_exitcode(status)
        if is_leaving or code == EXIT_CONFIG:
            return code if code >= 0 else 128 - code
        print(f"init: piped {arguments[0]} ended with {code}; it starts again", file=sys.stderr, flush=True)
        if signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, RESTART_S) is not None:
            return 0


def _reap(daemon: int) -> int | None:
    """Reap whatever ended; return the daemon's status if it did."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == daemon:
            status = ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
