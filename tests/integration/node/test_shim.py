"""A real shim with real processes: what it starts, stops, records and says again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from piped.cgroup import groups_of
from piped.lines import LineReader, encode
from piped.node.attempt_dir import kill_marked

WORKER = str(Path(__file__).parent / "workers" / "scripted.py")
DEADLINE_S = 20.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}")


class Daemon:
    """One connection to a shim, as the node daemon would hold it."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        folder = os.open(directory, os.O_RDONLY)

        def connect() -> bool:
            try:
                self.socket.connect(f"/proc/self/fd/{folder}/shim.sock")
            except OSError:
                return False
            return True

        eventually(connect, "the shim listens")
        os.close(folder)
        self.reader = LineReader()
        self.seen: list[dict[str, Any]] = []

    def say(self, **message: Any) -> None:
        self.socket.sendall(encode(message))

    def hear(self, wanted: str, rank: int | None = None) -> dict[str, Any]:
        """Return the first message of type `wanted` (of a worker: its message's type), reading until it comes."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for message in self.seen:
                name = message["message"]["type"] if message["type"] == "worker" else message["type"]
                if name == wanted and rank in (None, message.get("rank")):
                    return message
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError(f"the shim closed the connection before {wanted!r}")
            self.seen += self.reader.feed(data)
        raise AssertionError(f"no {wanted!r} within {DEADLINE_S} s; seen {self.seen}")

    def ended(self) -> bool:
        self.socket.settimeout(DEADLINE_S)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True


class Shim:
    def __init__(self, directory: Path) -> None:
        self.directory, self.marker = directory, str(uuid.uuid4())
        self.process = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "piped", "shim", "--dir", str(self.directory), "--fence", "7", "--job-id", "j1"],
            start_new_session=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "PIPED_SHIM": self.marker, "MASTER_ADDR": "elsewhere", "RANK": "9"},
        )

    def order(self, rank: int, act: str, argv: list[str] | None = None, **more: Any) -> dict[str, Any]:
        assign = {"type": "assign", "rank": rank, "attempt_dir": str(self.directory), "spec": {}}
        return {
            "rank": rank,
            "argv": argv or [sys.executable, WORKER, act],
            "env": {"A": "1"},
            "assign": assign,
            **more,
        }

    def leftovers(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    if self.marker.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    pass
        return found

    def record(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.directory / "ranks" / str(rank) / "exit.json").read_text()))

    def log(self, rank: int) -> str:
        return (self.directory / "ranks" / str(rank) / "log").read_text()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    directory = tmp_path / ("long" * 40) / "7"  # a unix address holds 107 bytes
    directory.mkdir(parents=True, mode=0o700)
    made = Shim(directory)
    yield made
    made.process.kill()
    made.process.communicate()
    eventually(lambda: not made.leftovers(), "every process of the shim is gone")
    eventually(lambda: not kill_marked(made.marker), "a killed shim's cgroups are removed, as its node does")
    assert not groups_of(made.marker)


def test_a_rank_that_ends_well_is_reported_in_order_and_recorded(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    assert daemon.hear("hello")["ranks"] == {}
    daemon.say(type="start", ranks=[shim.order(0, "done")])
    exited = daemon.hear("exited")
    assert (exited["code"], exited["signal"], exited["by_supervisor"]) == (0, None, False)
    told = [each for each in daemon.seen if each["type"] != "alive"]
    names = [m["message"]["type"] if m["type"] == "worker" else m["type"] for m in told]
    assert names == ["hello", "spawned", "store", "joined", "done", "exited"]
    assert shim.record(0)["code"] == 0
    assert shim.record(0)["messages"]["done"] == {"type": "done", "step": 7}
    assert shim.log(0) == "rank 0 acts done\n"
    assert (shim.directory / "ranks" / "0" / "started").exists()


def test_a_failure_carries_its_own_account_and_the_end_of_the_log(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "fail")])
    exited = daemon.hear("exited")
    assert exited["code"] == 1
    assert "Traceback: boom" in exited["log_tail"]
    assert daemon.hear("failed")["message"]["message"] == "boom"


def test_a_killed_worker_is_reported_with_its_signal(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "wait")])
    daemon.hear("joined")
    daemon.hear("alive")
    os.kill(daemon.hear("spawned")["pid"], signal.SIGKILL)
    exited = daemon.hear("exited")
    assert (exited["code"], exited["signal"], exited["by_supervisor"]) == (None, signal.SIGKILL, False)


def test_a_started_rank_is_never_started_again(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "done")])
    daemon.hear("exited")
    daemon.say(type="start", ranks=[shim.order(0, "done"), shim.order(1, "done")])
    daemon.hear("spawned", rank=1)
    assert [m["rank"] for m in daemon.seen if m["type"] == "spawned"] == [0, 1]
    assert shim.log(0).count("acts") == 1


def test_a_rank_whose_start_is_on_disk_is_refused(shim: Shim) -> None:
    (shim.directory / "ranks" / "0").mkdir(parents=True)
    (shim.directory / "ranks" / "0" / "started").write_text("{}")
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "done")])
    exited = daemon.hear("exited")
    assert exited["code"] == 126
    assert "not started" in exited["log_tail"]


def test_an_interpreter_that_does_not_exist_is_named(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "", argv=["/nowhere/python", "-m", "piped", "worker"])])
    exited = daemon.hear("exited")
    assert exited["code"] == 127
    assert "can't start '/nowhere/python': No such file or directory" in exited["log_tail"]


def test_stop_gives_a_polite_worker_its_grace(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "polite")])
    daemon.hear("joined")
    eventually(lambda: "ready to leave" in shim.log(0), "the worker handles SIGTERM")
    daemon.say(type="stop", grace_s=15.0)
    exited = daemon.hear("exited")
    assert (exited["code"], exited["by_supervisor"]) == (0, True)
    assert shim.log(0).endswith("leaving\n")


def test_a_worker_that_fails_during_a_stop_ended_by_itself(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "fail_at_sigterm")])
    daemon.hear("beat")
    daemon.say(type="stop", grace_s=15.0)
    exited = daemon.hear("exited")
    assert (exited["code"], exited["by_supervisor"]) == (1, False)
    assert shim.record(0)["by_supervisor"] is False


def test_a_worker_that_another_kills_during_its_grace_was_not_ended_by_us(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "ignore")])
    daemon.hear("joined")
    eventually(lambda: "ignoring" in shim.log(0), "the worker ignores SIGTERM")
    daemon.say(type="stop", grace_s=60.0)
    os.kill(daemon.hear("spawned")["pid"], signal.SIGKILL)
    exited = daemon.hear("exited")
    assert (exited["signal"], exited["by_supervisor"]) == (signal.SIGKILL, False)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "ignore")])
    daemon.hear("joined")
    eventually(lambda: "ignoring" in shim.log(0), "the worker ignores SIGTERM")
    began = time.monotonic()
    daemon.say(type="stop", grace_s=0.3)
    exited = daemon.hear("exited")
    assert (exited["signal"], exited["by_supervisor"]) == (signal.SIGKILL, True)
    assert time.monotonic() - began >= 0.3


def test_stop_without_grace_kills_at_once_and_nothing_starts_after_it(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "ignore")])
    daemon.hear("joined")
    daemon.say(type="stop", grace_s=0)
    assert daemon.hear("exited")["signal"] == signal.SIGKILL
    daemon.say(type="start", ranks=[shim.order(1, "done")])
    daemon.say(type="ack", keys=[[0, "exited"]])
    daemon.say(type="quit")
    assert daemon.ended()
    assert not (shim.directory / "ranks" / "1").exists()


def test_what_a_dead_worker_left_behind_dies_too(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "litter"), shim.order(1, "wait")])
    daemon.say(type="forward", rank=1, message={"type": "endpoint", "endpoint": "127.0.0.1:1234"})
    daemon.hear("joined", rank=1)
    assert daemon.hear("exited", rank=0)["code"] == 5
    pid = int(shim.log(0).split()[-1])
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the child in its own session is gone")
    assert Path(f"/proc/{daemon.hear('spawned', rank=1)['pid']}").exists()


def test_a_new_connection_replaces_the_old_and_hears_everything_unacknowledged(shim: Shim) -> None:
    first = Daemon(shim.directory)
    first.say(type="start", ranks=[shim.order(0, "done")])
    first.hear("exited")
    first.say(type="ack", keys=[[0, "store"], [0, "spawned"]])
    second = Daemon(shim.directory)
    assert second.hear("hello")["ranks"]["0"]["state"] == "exited"
    second.hear("exited")
    names = {m["message"]["type"] if m["type"] == "worker" else m["type"] for m in second.seen}
    assert names == {"hello", "joined", "done", "exited"}
    assert first.ended()


def test_quit_is_refused_until_every_exit_is_acknowledged(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "done")])
    daemon.hear("exited")
    daemon.say(type="quit")
    daemon.say(type="start", ranks=[shim.order(1, "done")])
    daemon.hear("spawned", rank=1)  # still there
    daemon.say(type="forward", rank=1, message={"type": "endpoint", "endpoint": "127.0.0.1:1234"})
    daemon.hear("exited", rank=1)
    daemon.say(type="ack", keys=[[0, "exited"], [1, "exited"]])
    daemon.say(type="quit")
    assert daemon.ended()
    assert shim.process.wait(DEADLINE_S) == 0
    assert not (shim.directory / "shim.sock").exists()


def test_an_attempt_never_gets_a_second_shim(shim: Shim) -> None:
    Daemon(shim.directory).hear("hello")
    second = shim.launch()
    _, stderr = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 1
    assert b"never gets a second one" in stderr


def test_a_flood_of_output_leaves_the_log_bounded_and_says_what_is_gone(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "flood")])
    assert daemon.hear("exited")["code"] == 0
    folder = shim.directory / "ranks" / "0"
    sizes = [(folder / name).stat().st_size for name in ("log", "log.1")]
    assert sum(sizes) <= (64 << 20) + 200
    header = (folder / "log").open("rb").readline().decode()
    dropped, kept = (int(word) for word in header.split() if word.isdigit())
    written = len("rank 0 acts flood\n") + 1200 * 65536
    assert dropped + kept + sizes[0] - len(header.encode()) == written
    rss_kib = int(Path(f"/proc/{shim.process.pid}/status").read_text().split("VmRSS:")[1].split()[0])
    assert rss_kib < 40 << 10


def test_a_worker_that_breaks_the_protocol_is_killed_and_its_log_says_why(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "babble")])
    exited = daemon.hear("exited")
    assert (exited["signal"], exited["by_supervisor"]) == (signal.SIGKILL, False)
    assert "wrote no message line to PIPED_FD" in exited["log_tail"]


def test_the_environment_of_a_worker_is_scrubbed_and_marked(shim: Shim) -> None:
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(3, "", argv=[sys.executable, "-c", code])])
    daemon.hear("exited")
    env = json.loads(shim.log(3))
    assert "MASTER_ADDR" not in env and "RANK" not in env
    assert (env["A"], env["PIPED_SHIM"], env["PIPED_RANK"]) == ("1", shim.marker, "3")


def test_sigterm_to_the_shim_stops_its_workers_and_keeps_their_records(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "wait")])
    daemon.hear("joined")
    shim.process.terminate()
    assert shim.process.wait(DEADLINE_S) == 0
    record = shim.record(0)
    assert (record["signal"], record["by_supervisor"]) == (signal.SIGTERM, True)


def test_killing_the_shim_kills_its_workers(shim: Shim) -> None:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, "wait")])
    daemon.hear("joined")
    pid = daemon.hear("spawned")["pid"]
    shim.process.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the worker is gone")
