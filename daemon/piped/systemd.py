"""What a daemon tells systemd: READY, STOPPING, STATUS and the watchdog's food. Standard library only.

Outside of systemd (no NOTIFY_SOCKET) every call does nothing. Called by the composition roots alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send e.g. "READY=1", "STATUS=…", "WATCHDOG=1", "STOPPING=1" as sd_notify(3) does; say whether somebody got it."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.connect("\0" + address[1:] if address.startswith("@") else address)  # "@": an abstract socket
            sender.send("\n".join(lines).encode())
    except OSError:  # nobody listens any more, or its queue is full: no reason to fail
        return False
    return True


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between two WATCHDOG=1 (half of WatchdogSec=); None when nobody watches this process.

    Feed it from the loop that does the work.
    """
    usec = environ.get("WATCHDOG_USEC", "")
    is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 2e6 if usec.isdigit() and is_ours else None
