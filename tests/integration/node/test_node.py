"""A real node daemon, real shims and processes, against a scripted coordinator over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pipeapi.v1 import jobs_pb2, nodes_pb2
from piped.node.attempt_dir import kill_marked

from .scripted_coordinator import Coordinator, attempt

PREPARE, RUN, STOP = nodes_pb2.PHASE_PREPARE, nodes_pb2.PHASE_RUN, nodes_pb2.PHASE_STOP
HERE = Path(__file__).parent


class Cluster:
    """The scripted coordinator and one node daemon with its state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.python = str(folder / "python")  # the interpreter of the workers: runs the script instead of piped
        Path(self.python).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "workers" / "scripted.py"}"\n')
        Path(self.python).chmod(0o755)
        self.coordinator = Coordinator()
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start_node(self, *flags: str, notify: str = "") -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "piped", "node", "--state-dir", str(self.state), "--name", "n1", "--slots", "2"]
        argv += ["--coordinator", f"127.0.0.1:{self.coordinator.port}", "--metrics", "127.0.0.1:0", *flags]
        with (self.folder / "daemon.log").open("ab") as log:
            env = {**os.environ, "NOTIFY_SOCKET": notify}
            daemon = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
        self.daemons.append(daemon)
        return daemon

    async def registered(self, times: int = 1) -> str:
        await self.coordinator.until(lambda: len(self.coordinator.hellos) >= times, f"{times} registrations")
        return self.coordinator.hellos[-1].node_id

    def attempt(self, phase: int, act: str, **fields: Any) -> nodes_pb2.DesiredAttempt:
        return attempt(phase, self.coordinator.hellos[-1].node_id, act, python=self.python, **fields)

    def endpoints(self) -> dict[str, Any]:
        return dict(json.loads((self.state / "endpoints.json").read_text()))

    async def scrape(self) -> str:
        url = f"http://{self.endpoints()['metrics']}/metrics"
        return (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()

    def go(self, code: int, fence: int = 7) -> None:
        """Let the workers that act `until_file` exit with `code`."""
        go = self.state / "attempts" / str(fence) / "go"
        go.with_suffix(".tmp").write_text(str(code))
        go.with_suffix(".tmp").rename(go)

    def live_processes(self) -> list[int]:
        markers = [json.loads(f.read_text())["marker"] for f in self.state.glob("attempts/*/attempt.json")]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if any(marker.encode() in environment for marker in markers):
                    found.append(int(entry.name))
        return found

    def clean(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        for pid in self.live_processes():  # what a failed test left
            os.kill(pid, signal.SIGKILL)
        for file in self.state.glob("attempts/*/attempt.json"):  # the cgroups of shims that were killed here
            kill_marked(json.loads(file.read_text())["marker"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.clean()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def promtool_says(text: str) -> tuple[int, str]:
    lint = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    return lint.returncode, lint.stderr


def play(cluster: Cluster, scene: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def run() -> None:
        await cluster.coordinator.start()
        try:
            await scene(cluster.coordinator)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{(cluster.folder / 'daemon.log').read_text()[-6000:]}") from error
        finally:
            await cluster.coordinator.stop()

    asyncio.run(run())


def test_a_job_of_two_ranks_is_prepared_run_reported_and_gone(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        hello = coordinator.hellos[0]
        assert (hello.node_name, [slot.device for slot in hello.slots]) == ("n1", ["cpu:0", "cpu:1"])
        coordinator.want(cluster.attempt(PREPARE, "done", num_ranks=2))
        await coordinator.heard(7, None, "prepared")
        coordinator.want(cluster.attempt(RUN, "done", num_ranks=2))
        store = await coordinator.heard(7, 0, "store_listening")
        await coordinator.heard(7, 1, "spawned")
        coordinator.want(cluster.attempt(RUN, "done", num_ranks=2, store_endpoint=store.endpoint))
        for rank in (0, 1):
            assert (await coordinator.heard(7, rank, "exited")).code == 0
            assert (await coordinator.heard(7, rank, "worker_done")).step == 7
        coordinator.want(cluster.attempt(STOP, "done", num_ranks=2))
        await coordinator.heard(7, None, "attempt_empty")
        assert cluster.live_processes() == []
        coordinator.want()
        closed = cluster.state / "attempts" / "7" / "closed"
        await coordinator.until(closed.exists, "the attempt is closed")
        assert len(coordinator.order) == len(set(coordinator.order)), "a fact was sent twice within one session"

    play(cluster, scene)


def test_stopping_with_grace_ends_what_ignores_it(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "ignore"))  # never asked to prepare: it does so by itself
        await coordinator.heard(7, 0, "joined")
        await coordinator.until(
            lambda: any(b.progress and b.progress[0].progress.step > 1 for b in coordinator.beats), "progress"
        )
        coordinator.want(cluster.attempt(STOP, "ignore", grace_s=0.3, stop_trigger="cancelled"))
        exited = await coordinator.heard(7, 0, "exited")
        assert (exited.signal, exited.by_supervisor) == (signal.SIGKILL, True)
        await coordinator.heard(7, None, "attempt_empty")
        assert cluster.live_processes() == []

    play(cluster, scene)


def test_a_failing_worker_is_reported_with_its_account_and_log(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "fail"))
        exited = await coordinator.heard(7, 0, "exited")
        assert (exited.code, exited.by_supervisor) == (1, False)
        assert "Traceback: boom" in exited.log_tail
        failed = await coordinator.heard(7, 0, "worker_failed")
        assert (failed.message, failed.peer_rank, failed.step) == ("boom", -1, 3)

    play(cluster, scene)


def test_a_daemon_killed_and_started_again_re_adopts_with_the_exact_exit_codes(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        first = cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "until_file"))
        pid = (await coordinator.heard(7, 0, "spawned")).pid
        await coordinator.heard(7, 0, "joined")
        first.kill()
        first.wait()
        cluster.start_node()
        await cluster.registered(times=2)
        again = coordinator.hellos[1]
        assert [(a.fence, a.job_id, a.shim_alive, list(a.started_ranks)) for a in again.attempts] == [
            (7, "j1", True, [0])
        ]
        assert (again.node_id, again.cluster_id, again.highest_epoch) == (coordinator.hellos[0].node_id, "c1", 1)
        assert is_alive(pid)
        cluster.go(42)
        exited = await coordinator.heard(7, 0, "exited")
        assert (exited.code, exited.by_supervisor) == (42, False)

    play(cluster, scene)


def test_a_worker_that_ends_while_no_daemon_is_there_is_reported_later(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        first = cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "until_file"))
        pid = (await coordinator.heard(7, 0, "spawned")).pid
        first.kill()
        first.wait()
        os.kill(pid, signal.SIGKILL)
        await coordinator.until((cluster.state / "attempts/7/ranks/0/exit.json").exists, "the shim's record")
        cluster.start_node()
        exited = await coordinator.heard(7, 0, "exited")
        assert (exited.signal, exited.by_supervisor) == (signal.SIGKILL, False)
        coordinator.want(cluster.attempt(STOP, "until_file"))
        await coordinator.heard(7, None, "attempt_empty")
        assert cluster.live_processes() == []

    play(cluster, scene)


def test_a_shim_that_dies_without_a_record_loses_its_ranks_and_leaves_nothing(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "wait"))
        await coordinator.heard(7, 0, "joined")
        os.kill(json.loads((cluster.state / "attempts/7/shim.json").read_text())["pid"], signal.SIGKILL)
        await coordinator.heard(7, 0, "rank_lost")
        await coordinator.until(lambda: not cluster.live_processes(), "the worker is gone")
        coordinator.want(cluster.attempt(STOP, "wait"))
        await coordinator.heard(7, None, "attempt_empty")
        assert (7, 0, "exited") not in coordinator.facts

    play(cluster, scene)


def test_facts_are_sent_again_until_they_are_acknowledged(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.acknowledges = False
        coordinator.want(cluster.attempt(RUN, "done"))
        await coordinator.heard(7, 0, "exited")
        await coordinator.stop()
        coordinator.facts.clear()
        coordinator.acknowledges, coordinator.epoch = True, 2
        await coordinator.start()
        for kind in ("spawned", "store_listening", "joined", "worker_done", "exited"):
            await coordinator.heard(7, 0, kind)
        assert coordinator.hellos[-1].attempts[0].fence == 7

    play(cluster, scene)


def test_an_attempt_that_is_not_mentioned_runs_on(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "wait"))
        pid = (await coordinator.heard(7, 0, "spawned")).pid
        coordinator.want()
        revision = coordinator.revision
        await coordinator.until(lambda: coordinator.beats[-1].desired_rev == revision, "the revision is acted on")
        coordinator.want(cluster.attempt(RUN, "done", fence=8))
        await coordinator.heard(8, 0, "exited")
        assert is_alive(pid)

    play(cluster, scene)


def test_source_is_fetched_and_unpacked_and_a_damaged_one_refused(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            member = tarfile.TarInfo("pkg/code.py")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"x = 1"))
        good = hashlib.sha256(packed.getvalue()).hexdigest()
        coordinator.artifacts = {good: packed.getvalue(), "0" * 64: b"something else"}
        cluster.start_node()
        await cluster.registered()
        coordinator.want(
            cluster.attempt(PREPARE, "done", source_sha256=good),
            cluster.attempt(PREPARE, "done", fence=8, source_sha256="0" * 64),
            cluster.attempt(PREPARE, "done", fence=9, source_sha256="1" * 64),
        )
        await coordinator.heard(7, None, "prepared")
        assert (cluster.state / "attempts/7/source/pkg/code.py").read_text() == "x = 1"
        assert "arrived damaged" in (await coordinator.heard(8, None, "prepare_failed")).message
        assert "NOT_FOUND: no such artifact" in (await coordinator.heard(9, None, "prepare_failed")).message
        fences = (7, 8, 9)
        coordinator.want(*(cluster.attempt(STOP, "done", fence=fence) for fence in fences))
        for fence in fences:
            await coordinator.heard(fence, None, "attempt_empty")

    play(cluster, scene)


def test_an_interpreter_that_is_missing_fails_the_preparation(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        cluster.python = "/nowhere/python"
        coordinator.want(cluster.attempt(PREPARE, "done"))
        failed = await coordinator.heard(7, None, "prepare_failed")
        assert "'/nowhere/python' is no executable file on this node" in failed.message

    play(cluster, scene)


def test_metrics_pass_promtool_and_counters_never_go_back_over_a_restart(cluster: Cluster) -> None:
    def steps(text: str) -> float:
        match = re.search(r'^piped_steps_total\{job_id="j1"\} (\S+)$', text, re.M)
        return float(match[1]) if match else -1.0

    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "until_file"))
        await coordinator.heard(7, 0, "joined")
        texts = [""]

        async def counted(least: float) -> None:
            while steps(texts[0]) < least:
                texts[0] = await cluster.scrape()
                await asyncio.sleep(0.02)

        await asyncio.wait_for(counted(3), 20)
        assert 'piped_chunk_duration_seconds_count{job_id="j1",phase="forward",stage="0"} 0.0' in texts[0]
        assert 'piped_job_state{job_id="j1",state="running"} 1.0' in texts[0]
        assert 'piped_worker_info{device="cpu:0",job_id="j1",node="n1",rank="0",stage="0"} 1.0' in texts[0]
        assert await asyncio.to_thread(promtool_says, texts[0]) == (0, "")
        before = steps(texts[0])
        cluster.go(0)
        await coordinator.heard(7, 0, "exited")
        coordinator.want(cluster.attempt(RUN, "until_file", fence=8))
        await coordinator.heard(8, 0, "joined")
        assert steps(await cluster.scrape()) >= before
        await asyncio.wait_for(counted(before + 1), 20)
        cluster.go(0, fence=8)
        await coordinator.heard(8, 0, "exited")
        assert 'piped_worker_exits_total{job_id="j1",reason="success",stage="0"} 2.0' in await cluster.scrape()

    play(cluster, scene)


def test_logs_are_answered_from_any_offset_and_end_with_the_rank(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "until_file"))
        await coordinator.heard(7, 0, "joined")
        log: dict[str, Any] = {"fence": 7, "rank": 0, "kind": jobs_pb2.RECORD_KIND_LOG, "max_bytes": 1 << 16}
        line = b"rank 0 acts until_file\n"
        first = await coordinator.ask(**log, wait_s=10)
        assert (first.data, first.next_offset, first.eof) == (line, len(line), False)
        assert (await coordinator.ask(**log, tail_bytes=5)).data == line[-5:]
        nothing = await coordinator.ask(**log, offset=len(line), wait_s=0.05)
        assert (nothing.data, nothing.eof) == (b"", False)
        last = asyncio.create_task(coordinator.ask(**log, offset=len(line), wait_s=30))
        cluster.go(0)
        assert ((await last).data, last.result().eof) == (b"", True)
        missing = await coordinator.ask(fence=99, rank=0, kind=jobs_pb2.RECORD_KIND_LOG)
        assert "attempt 99 is not on this node" in missing.error
        plan = await coordinator.ask(fence=7, rank=0, kind=jobs_pb2.RECORD_KIND_PLAN)
        assert (plan.data, plan.eof) == (b"", True)

    play(cluster, scene)


def test_a_second_daemon_on_the_same_state_is_refused_by_pid(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        first = cluster.start_node()
        await cluster.registered()
        assert cluster.endpoints()["pid"] == first.pid
        second = cluster.start_node()
        assert await asyncio.to_thread(second.wait, 20) == 1
        assert f"the node daemon with pid {first.pid} uses it" in (cluster.folder / "daemon.log").read_text()

    play(cluster, scene)


def test_another_cluster_is_refused(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        log = cluster.folder / "daemon.log"
        await coordinator.until(lambda: '"session_open"' in log.read_text(), "the first welcome, and its note on disk")
        daemon.terminate()
        assert await asyncio.to_thread(daemon.wait, 20) == 0
        coordinator.cluster_id = "c2"
        cluster.start_node()
        await coordinator.until(lambda: "belongs to cluster c2, this node to c1" in log.read_text(), "the refusal")

    play(cluster, scene)


def test_sigterm_leaves_the_workers_unless_told_otherwise(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        first = cluster.start_node()
        await cluster.registered()
        coordinator.want(cluster.attempt(RUN, "polite"))
        pid = (await coordinator.heard(7, 0, "spawned")).pid
        await coordinator.heard(7, 0, "joined")
        first.terminate()
        assert await asyncio.to_thread(first.wait, 20) == 0
        assert is_alive(pid)
        assert not (cluster.state / "endpoints.json").exists()
        second = cluster.start_node("--stop-workers-on-exit")
        await cluster.registered(times=2)
        second.terminate()
        assert await asyncio.to_thread(second.wait, 20) == 0
        assert cluster.live_processes() == []
        assert coordinator.facts[7, 0, "exited"].exited.by_supervisor

    play(cluster, scene)


def test_a_daemon_leaves_also_in_the_moment_when_its_session_breaks(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        daemon = cluster.start_node()
        await cluster.registered()
        await coordinator.until(lambda: coordinator.beats, "a beat")
        stopping = asyncio.create_task(coordinator.stop())
        daemon.terminate()
        await stopping
        assert await asyncio.to_thread(daemon.wait, 20) == 0

    play(cluster, scene)


def test_a_session_whose_beats_nobody_acknowledges_is_opened_again(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        coordinator.acknowledges_beats, coordinator.lease_ttl_s = False, 0.3
        cluster.start_node()
        await cluster.registered(times=2)
        assert "no beat was acknowledged for" in (cluster.folder / "daemon.log").read_text()
        assert len(coordinator.beats) >= 3

    play(cluster, scene)


def test_a_stop_during_the_preparation_gives_it_up(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        cluster.start_node()
        await cluster.registered()
        coordinator.withholds_artifacts = True
        coordinator.want(cluster.attempt(PREPARE, "done", source_sha256="1" * 64))
        await coordinator.until((cluster.state / "attempts" / "7").exists, "the preparation began")
        coordinator.want(cluster.attempt(STOP, "done"))
        await coordinator.heard(7, None, "attempt_empty")
        assert (7, None, "prepare_failed") not in coordinator.facts
        assert not (cluster.state / "attempts" / "7" / "shim.json").exists()

    play(cluster, scene)


def test_ready_and_healthy_mean_registered(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        await coordinator.stop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(f"\0{cluster.folder}"[:100])
            systemd.settimeout(20)
            cluster.start_node("--health", "127.0.0.1:0", notify=f"@{cluster.folder}"[:100])
            await coordinator.until((cluster.state / "endpoints.json").exists, "the daemon listens")
            async with grpc.aio.insecure_channel(cluster.endpoints()["health"]) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check

                async def status(service: str) -> int:
                    answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                    return int(answer.status)

                assert await status("") == health_pb2.HealthCheckResponse.SERVING
                assert await status("registered") == health_pb2.HealthCheckResponse.NOT_SERVING
                await coordinator.start()
                messages = []
                while not messages or not messages[-1].startswith(b"READY=1"):
                    messages.append(await asyncio.to_thread(systemd.recv, 500))
                assert all(message.startswith(b"STATUS=looking for") for message in messages[:-1])
                assert await status("registered") == health_pb2.HealthCheckResponse.SERVING

    play(cluster, scene)


def test_a_port_that_is_taken_ends_the_daemon_with_its_name(cluster: Cluster) -> None:
    async def scene(coordinator: Coordinator) -> None:
        for flag in ("--metrics", "--health"):
            daemon = cluster.start_node(flag, f"127.0.0.1:{coordinator.port}")
            assert await asyncio.to_thread(daemon.wait, 20) == 1
        log = (cluster.folder / "daemon.log").read_text()
        assert log.count(f"{coordinator.port}") >= 2 and log.count("choose another port") == 2

    play(cluster, scene)
