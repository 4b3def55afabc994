from __future__ import annotations

import os
import socket
from pathlib import Path

from piped.systemd import notify, watchdog_interval_s


def test_readiness_arrives_as_one_datagram(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        assert notify("READY=1", "STATUS=registered", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert receiver.recv(200) == b"READY=1\nSTATUS=registered"


def test_an_abstract_socket_works_too() -> None:
    name = f"piped-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        assert notify("WATCHDOG=1", environ={"NOTIFY_SOCKET": "@" + name})
        assert receiver.recv(200) == b"WATCHDOG=1"


def test_without_anyone_listening_nothing_happens(tmp_path: Path) -> None:
    assert not notify("READY=1", environ={})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})


def test_the_watchdog_is_fed_at_half_its_time_and_only_by_whom_it_watches() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}) == 15.0
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_interval_s({}) is None
