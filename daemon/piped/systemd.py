"""What a daemon tells systemd: READY, STOPPING, STATUS and the watchdog's food. Standard library only.

Outside of systemd (no NOTIFY_SOCKET) every call does nothing. The composition roots build one Notifier.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Datagrams to NOTIFY_SOCKET, as sd_notify(3) defines them."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address  # "@": an abstract socket
        usec = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval_s: float | None = int(usec) / 2e6 if usec.isdigit() and is_ours else None
        """Seconds between two `watchdog()` calls (half of WatchdogSec=); None: nobody watches."""

    def notify(self, *lines: str) -> bool:
        """Send e.g. "READY=1", "STATUS=…"; say whether somebody got it. A full or absent socket is no error."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.connect(self._address)
                sender.send("\n".join(lines).encode())
        except OSError:
            return False
        return True

    def ready(self, status: str = "") -> bool:
        """Say that the service's listeners are bound and it serves."""
        return self.notify("READY=1", *([f"STATUS={status}"] if status else []))

    def stopping(self) -> bool:
        """Say that the service began to leave."""
        return self.notify("STOPPING=1")

    def watchdog(self) -> bool:
        """Feed the watchdog; call from the loop that does the work, every `watchdog_interval_s`."""
        return self.notify("WATCHDOG=1")
