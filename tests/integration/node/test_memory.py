"""Each rank in a memory cgroup of its own, where this machine has any to give; without one a shim tells less, and says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from piped.cgroup import V2, Group, groups_of, own_group
from tests.support.cgroups import can_divide

from .test_shim import Daemon, Shim, eventually, shim

__all__ = ["shim"]
DIVIDES = can_divide()


def start(shim: Shim, act: str, memory_bytes: int) -> Daemon:
    daemon = Daemon(shim.directory)
    daemon.say(type="start", ranks=[shim.order(0, act, memory_bytes=memory_bytes)])
    return daemon


def test_a_worker_that_takes_more_than_its_memory_is_told_from_one_that_was_killed(shim: Shim) -> None:
    exited = start(shim, "starve", 256 << 20).hear("exited")
    if DIVIDES:
        assert (exited["signal"], exited["oom_killed"], exited["by_supervisor"]) == (9, True, False)
        assert shim.record(0)["oom_killed"] is True
    else:
        assert exited["oom_killed"] is False
        assert "nothing holds this rank to 268435456 bytes" in shim.log(0)


def test_a_killed_worker_was_not_killed_for_want_of_memory(shim: Shim) -> None:
    daemon = start(shim, "wait", 1 << 30)
    os.kill(daemon.hear("spawned")["pid"], signal.SIGKILL)
    exited = daemon.hear("exited")
    assert (exited["signal"], exited["oom_killed"]) == (9, False)


def test_a_shim_that_ends_leaves_no_cgroup(shim: Shim) -> None:
    daemon = start(shim, "wait", 0)
    daemon.hear("joined")
    assert len(groups_of(shim.marker)) == DIVIDES
    shim.process.terminate()
    shim.process.wait(timeout=20)
    assert not groups_of(shim.marker)


def test_a_child_without_mark_session_or_parent_dies_with_its_worker(shim: Shim) -> None:
    daemon = start(shim, "hide", 0)
    assert daemon.hear("exited")["code"] == 5
    eventually(lambda: not groups_of(shim.marker), "its cgroup is empty and gone")


def test_under_version_2_leaves_lie_beside_the_daemons_own_group(tmp_path: Path) -> None:
    folder = machine(tmp_path, "/system.slice/piped.service/daemon")
    group = own_group(tmp_path)
    assert group == Group(folder.parent, V2)
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+memory"


def test_where_no_memory_is_counted_there_is_no_group_and_no_kill(tmp_path: Path) -> None:
    assert own_group(tmp_path) is None, "no /proc"
    group = Group(machine(tmp_path, "/x"), V2)
    assert group.oom_kills == 0
    (group.path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.oom_kills == 2


def machine(root: Path, path: str) -> Path:
    """Return the folder of a process's group, as version 2 is mounted."""
    (root / "proc/self").mkdir(parents=True)
    mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    (root / "proc/self/mountinfo").write_text("22 1 0:21 / / rw - ext4 /dev/x rw\n" + mount)
    (root / "proc/self/cgroup").write_text(f"0::{path}\n")
    folder = root / "sys/fs/cgroup" / path.lstrip("/")
    folder.mkdir(parents=True)
    return folder
