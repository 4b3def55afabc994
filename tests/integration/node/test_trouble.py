"""One attempt's trouble is that attempt's alone: whatever is in its source or its job file, the daemon and the others
go on."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from pipeapi.v1 import nodes_pb2, spec_pb2

from .scripted_coordinator import Coordinator
from .test_node import PREPARE, RUN, STOP, Cluster, cluster, play

__all__ = ["cluster"]


def archive_of(member: tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    return packed.getvalue()


def hostile_archives() -> list[bytes]:
    late, nul = tarfile.TarInfo("late.py"), tarfile.TarInfo("plain.py")
    late.pax_headers = {"mtime": "1e20"}  # OverflowError when it is set
    nul.pax_headers = {"path": "a\0b.py"}  # ValueError when it is opened
    return [archive_of(late), archive_of(nul)]


async def runs(coordinator: Coordinator, cluster: Cluster, daemon: subprocess.Popen[bytes]) -> None:
    """Prove that the daemon and the attempt 7 are the ones that were there before."""
    assert daemon.poll() is None
    assert len(coordinator.hellos) == 1, "the daemon held one session all the time"
    cluster.go(0)
    assert (await coordinator.heard(7, 0, "exited")).code == 0


def test_a_source_that_breaks_the_unpacking_refuses_its_attempt_alone(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        archives = {hashlib.sha256(each).hexdigest(): each for each in hostile_archives()}
        coordinator.artifacts = archives
        daemon = cluster.start_node()
        await cluster.registered()
        good = cluster.attempt(RUN, "until_file")
        coordinator.want(good)
        await coordinator.heard(7, 0, "joined")
        bad = [cluster.attempt(PREPARE, "done", fence=8 + i, source_sha256=sha) for i, sha in enumerate(archives)]
        coordinator.want(good, *bad)
        for each in bad:
            message = (await coordinator.heard(each.fence, None, "prepare_failed")).message
            assert "can't be fetched or unpacked" in message and each.spec.source_sha256[:12] in message
        await runs(coordinator, cluster, daemon)

    play(cluster, scene)


def long_attempt(cluster: Cluster, phase: int, fence: int) -> nodes_pb2.DesiredAttempt:
    wanted = cluster.attempt(phase, "done", fence=fence)
    wanted.spec.params["text"].CopyFrom(spec_pb2.ParamValue(string_value="é" * 200_000))  # 6 bytes each in JSON
    return wanted


def test_an_assignment_longer_than_a_line_refuses_its_attempt_before_anything_is_started(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        await cluster.registered()
        good = cluster.attempt(RUN, "until_file")
        coordinator.want(good)
        await coordinator.heard(7, 0, "joined")
        coordinator.want(good, long_attempt(cluster, PREPARE, 8))
        message = (await coordinator.heard(8, None, "prepare_failed")).message
        assert "the limit is 1048576" in message and "put large values into a file" in message
        coordinator.want(good, long_attempt(cluster, STOP, 8))
        await coordinator.heard(8, None, "attempt_empty")
        assert not (cluster.state / "attempts/8/shim.json").exists()
        await runs(coordinator, cluster, daemon)

    play(cluster, scene)


def test_an_assignment_that_became_too_long_after_the_preparation_refuses_its_attempt_too(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        await cluster.registered()
        good = cluster.attempt(RUN, "until_file")
        coordinator.want(good, cluster.attempt(PREPARE, "done", fence=8))
        await coordinator.heard(7, 0, "joined")
        await coordinator.heard(8, None, "prepared")
        coordinator.want(good, long_attempt(cluster, RUN, 8))
        assert "the limit is 1048576" in (await coordinator.heard(8, None, "prepare_failed")).message
        coordinator.want(good, long_attempt(cluster, STOP, 8))
        await coordinator.heard(8, None, "attempt_empty")
        await runs(coordinator, cluster, daemon)
        log = (cluster.folder / "daemon.log").read_text()
        assert "start_message" in log and "secret" not in log, "a traceback shows where, and no value of a job's env"

    play(cluster, scene)


def test_a_damaged_attempt_directory_keeps_no_daemon_from_starting(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        first = cluster.start_node()
        await cluster.registered()
        good = cluster.attempt(RUN, "until_file")
        coordinator.want(good)
        await coordinator.heard(7, 0, "joined")
        first.kill()
        first.wait()
        damaged = cluster.state / "attempts" / "5"
        (damaged / "ranks" / "x").mkdir(parents=True)
        (damaged / "ranks" / "x" / "started").touch()
        (damaged / "shim.json").write_text(json.dumps({"pid": [], "boot_id": boot_id()}))
        (damaged / "prepare_failed").write_bytes(b"\xff\xfe")
        coordinator.hellos.clear()
        second = cluster.start_node()
        await cluster.registered()
        assert [each.fence for each in coordinator.hellos[0].attempts] == [5, 7]
        coordinator.want(good, cluster.attempt(STOP, "done", fence=5))
        await coordinator.heard(5, None, "attempt_empty")
        await runs(coordinator, cluster, second)

    play(cluster, scene)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_full_disk_in_the_moment_of_joining_ends_the_session_and_not_the_daemon(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        await cluster.registered()
        await coordinator.until(lambda: coordinator.beats, "a beat")
        blocked = cluster.state / ".cluster.json.tmp"
        blocked.mkdir()  # as a full disk: the new epoch can't be written
        await coordinator.stop()
        coordinator.hellos.clear()
        coordinator.beats.clear()
        coordinator.epoch = 2
        await coordinator.start()
        await cluster.registered(times=2)  # it tries again
        assert daemon.poll() is None
        assert not coordinator.beats
        blocked.rmdir()
        await coordinator.until(lambda: coordinator.beats, "a beat: the session stands")

    play(cluster, scene)


def test_a_desired_state_of_many_long_jobs_reaches_the_node(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        await cluster.registered()
        good = cluster.attempt(RUN, "until_file")
        others = [long_attempt(cluster, nodes_pb2.PHASE_UNSPECIFIED, fence) for fence in range(8, 28)]
        assert sum(each.ByteSize() for each in others) > 4 << 20, "more than gRPC takes by default"
        coordinator.want(good, *others)
        await coordinator.heard(7, 0, "joined")
        await runs(coordinator, cluster, daemon)

    play(cluster, scene)
