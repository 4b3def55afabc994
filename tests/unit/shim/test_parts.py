"""The shim's parts that need no process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piped import cgroup
from piped.lines import MAX_LINE_BYTES, LineReader, encode
from piped.shim import records
from piped.shim.environment import worker_environment
from piped.shim.logfile import LogFile
from piped.shim.outbox import Outbox


def test_the_outbox_keeps_the_newest_of_each_kind_and_gives_it_again() -> None:
    box = Outbox()
    for step in range(3):
        box.put(0, "metrics", {"type": "worker", "step": step})
        box.put(0, "beat", {"type": "worker", "beat": step})
    box.put(0, "exited", {"type": "exited"})
    assert [box.next() for _ in range(4)] == [
        {"type": "worker", "step": 2},
        {"type": "worker", "beat": 2},
        {"type": "exited"},
        None,
    ]
    box.resend()  # a beat is not worth keeping
    assert [box.next() for _ in range(3)] == [{"type": "worker", "step": 2}, {"type": "exited"}, None]
    assert box.holds("exited")
    box.acknowledge(0, "exited")
    box.acknowledge(0, "metrics")  # a counter's last value is wanted as long as the shim lives
    box.resend()
    assert [box.next(), box.next()] == [{"type": "worker", "step": 2}, None]
    assert not box.holds("exited")


def test_lines_survive_any_cut_and_bad_ones_are_refused() -> None:
    reader, stream = LineReader(), encode({"type": "a", "text": "zwölf\n"}) + encode({"type": "b"})
    heard = [message for byte in stream for message in reader.feed(bytes([byte]))]
    assert heard == [{"type": "a", "text": "zwölf\n"}, {"type": "b"}]
    for bad in (b"[1]\n", b"nonsense\n", b"{}\n"):
        with pytest.raises(ValueError):
            LineReader().feed(bad)
    with pytest.raises(ValueError, match="a line of more than"):
        LineReader().feed(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(ValueError, match="message of type 'a' has"):
        encode({"type": "a", "text": "x" * MAX_LINE_BYTES})


def test_a_launchers_variables_do_not_reach_a_worker_and_the_jobs_do() -> None:
    base = {"PATH": "/bin", "RANK": "3", "SLURM_JOB_ID": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    env = worker_environment(base | {"NOTIFY_SOCKET": "/x"}, {"A": "1"}, rank=2, descriptor=9, marker="m")
    assert env == {"PATH": "/bin", "A": "1", "PIPED_FD": "9", "PIPED_SHIM": "m", "PIPED_RANK": "2"}


def test_a_start_is_recorded_once(tmp_path: Path) -> None:
    records.mark_started(tmp_path / "ranks" / "0", {})
    with pytest.raises(FileExistsError):
        records.mark_started(tmp_path / "ranks" / "0", {})


def test_a_full_disk_is_said_in_the_log_once_there_is_room(tmp_path: Path) -> None:
    log = LogFile(tmp_path)
    log.write(b"before\n")
    full = os.open("/dev/full", os.O_WRONLY)
    mine = os.dup(log._file)
    os.dup2(full, log._file)
    log.write(b"lost\n")
    os.dup2(mine, log._file)
    log.write(b"after\n")
    assert (tmp_path / "log").read_text() == "before\n\n… dropped 5 bytes: they could not be written\nafter\n"
    log.close()
    os.close(full)
    os.close(mine)


def test_a_kill_that_was_survived_is_no_end_for_want_of_memory_and_each_tells_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(cgroup.time, "monotonic", lambda: now_s[0])
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom_kill 3\n")
    kills = cgroup.Kills(cgroup.Group(tmp_path, cgroup.V2))
    assert not kills.take(), "what was counted before"
    counter.write_text("low 0\noom_kill 4\n")
    now_s[0] = 1.5
    kills.sample()
    assert kills.take(), "just now"
    assert not kills.take()
    counter.write_text("low 0\noom_kill 5\n")
    for now_s[0] in (3.0, 4.5):
        kills.sample()
    assert not kills.take(), "of a helper, seconds ago"
