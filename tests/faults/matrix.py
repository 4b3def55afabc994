"""Every way in which a rank can end, on its neighbour's node and on another, one of whose clocks is an hour off: who is blamed.

`run` submits the jobs and returns what came of each; test_root_cause asserts on it once, `make soak` twenty times with a table.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeapi.v1 import jobs_pb2
from tests.support.cgroups import can_divide
from tests.support.cluster import Cluster, processes_of, wait_until

PROGRAMS = Path(__file__).parent / "programs"
SAME, OTHER = PLACES = ("same node", "other node")
NODE_LOSS = "node loss"
WAYS = {  # how it ends: the reason, the rank that is blamed, what is told
    "exit 7": ("USER_ERROR", 1, "exited with code 7"),
    "exit 0": ("USER_ERROR", 1, "exited 0 before it said that it was done"),
    "exception": ("USER_ERROR", 1, "ValueError: told by itself"),
    "SIGKILL": ("SIGNALLED", 1, "killed by signal 9"),
    "SIGSEGV": ("SIGNALLED", 1, "killed by signal 11"),
    "SIGSTOP": ("HANG", 1, "said nothing"),
    "NaN": ("NUMERIC", -1, "the loss is nan in step 1"),
    "OOM": ("OOM_KILLED", 1, "for want of memory"),
    NODE_LOSS: ("NODE_LOST", 1, ""),
}
ALIKE = {"exit 0", "exception", "SIGSEGV", "NaN"}  # as others are where both ranks have one host: only in the soak
if not can_divide():  # nothing but a cgroup's counter tells it from a SIGKILL
    del WAYS["OOM"]

ALL_CELLS = [(way, place) for way in WAYS for place in PLACES]
CELLS = [(way, place) for way, place in ALL_CELLS if place == OTHER or way not in ALIKE]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of one job, and how fast."""

    way: str
    place: str
    failure: jobs_pb2.Failure
    is_placed_right: bool
    verdict_ms: float | None = None  # from the rank's end to a stored verdict
    stopped_ms: float | None = None  # from the rank's end to its neighbour's

    @property
    def reason(self) -> str:
        return jobs_pb2.FailureReason.Name(self.failure.reason).removeprefix("FAILURE_REASON_")

    @property
    def verdict(self) -> str:
        """Return "right", "tie" or "wrong"; where a whole node is lost, any of its ranks is right."""
        reason, rank, told = WAYS[self.way]
        ranks = (0, 1) if (self.way, self.place) == (NODE_LOSS, SAME) else (rank,)
        if "not known" in self.failure.message:
            return "tie"
        is_right = self.reason == reason and self.failure.rank in ranks and told in self.failure.message
        return "right" if is_right else "wrong"


def fleet(folder: Path, clock_s: int) -> Cluster:
    """Return a cluster of two nodes whose clocks differ by `clock_s`, and three more to be lost."""
    cluster = Cluster(folder, nodes=0)
    config = folder / "clock.toml"
    config.write_text(f"clock_offset_s = {clock_s}\n")
    cluster.add_node(4, "--label", "pool=kept")
    cluster.add_node(4, "--label", "pool=kept", "--label", "host=one", "--config", str(config))
    cluster.add_node(2, "--label", f"pool={name_of(SAME)}")
    cluster.add_node(1, "--label", f"pool={name_of(OTHER)}")
    cluster.add_node(1, "--label", f"pool={name_of(OTHER)}", "--config", str(config))
    return cluster


def run(cluster: Cluster, cells: Collection[tuple[str, str]], repeats: int = 1) -> Iterator[Outcome]:
    """Yield the outcome of every way and place of `cells`, `repeats` times."""
    for repeat in range(repeats):
        ids = {cell: cluster.submit(job(*cell, repeat)) for cell in cells}
        lost = {place: ids.pop((NODE_LOSS, place)) for place in PLACES}
        for place in PLACES:
            yield lose_node(cluster, place, lost[place])
        for (way, place), job_id in ids.items():
            ended = cluster.wait_for(job_id, "FAILED", timeout_s=300)
            yield Outcome(way, place, ended.failure, is_placed(ended, place), *times(cluster, job_id))


def lose_node(cluster: Cluster, place: str, job_id: str) -> Outcome:
    """Kill everything of the node that rank 1 is on; an admin then says that it is gone, and it comes back empty."""
    cluster.wait_for(job_id, "RUNNING", timeout_s=300)
    placed = cluster.api.get(job_id)
    name = placed.workers[1].node_name
    node = next(each for each in cluster.nodes if each.name == name)
    node.kill()
    for pid in processes_of(None, cluster.markers_on(name)):
        with contextlib.suppress(ProcessLookupError):  # a worker dies with its shim
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state_of(cluster, name) == "NODE_STATE_LOST", 30, f"the loss of {name}")
    done = cluster.pipectl("forget", name, "--why", "test")
    assert done.returncode == 0, done.stderr
    report = wait_until(lambda: final_report(cluster, job_id), 30, "the report")
    cluster.pipectl("cancel", job_id)  # it is to start anew
    node.start()
    return Outcome(NODE_LOSS, place, report.failure, is_placed(placed, place))


def job(way: str, place: str, repeat: int) -> dict[str, object]:
    is_lost = way == NODE_LOSS
    selector = {"pool": name_of(place)} if is_lost else {"host": "one"} if place == SAME else {"pool": "kept"}
    resources: dict[str, object] = {"slots_per_node": 2 if place == SAME else 1, "node_selector": selector}
    if way == "OOM":
        resources["memory"] = "1GiB"
    return {
        "version": 1,
        "name": name_of(f"{place} {way} {repeat}"),
        "program": "ends:Ends",
        "source": str(PROGRAMS),
        "params": {"how": way},
        "pipeline": {"stages": 2, "chunks": 2},
        "resources": resources,
        "train": {"steps": 100_000 if is_lost else 9, "log_every": 1000},
        "recovery": {"hang_timeout": 4 if way == "SIGSTOP" else 60},
    }


def name_of(text: str) -> str:
    return text.lower().replace(" ", "-")


def is_placed(job: jobs_pb2.Job, place: str) -> bool:
    return len({worker.node_name for worker in job.workers}) == (1 if place == SAME else 2)


def state_of(cluster: Cluster, name: str) -> str:
    (node,) = [each for each in cluster.api.nodes() if each.node_name == name]
    return type(node).DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[node.state].name


def final_report(cluster: Cluster, job_id: str) -> jobs_pb2.FailureReportResponse | None:
    if cluster.api.get(job_id).attempt == 1 and cluster.state(job_id) in ("STARTING", "RUNNING"):
        return None
    report = cluster.api.call(cluster.api.jobs.FailureReport, jobs_pb2.FailureReportRequest(job=job_id, attempt=1))
    return report if report.final else None


def times(cluster: Cluster, job_id: str) -> tuple[float | None, float | None]:
    """Return the milliseconds from rank 1's end to a stored verdict, and to its neighbour's end, on the clock since boot.

    None where its end was not the first thing that happened.
    """
    wall_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    exits = {}
    for file in (file for folder in cluster.attempt_dirs(job_id) for file in folder.glob("ranks/*/exit.json")):
        exits[int(file.parent.name)] = json.loads(file.read_text())
    (stopping,) = cluster.events(job_id, "attempt_stopping")
    if exits[1]["by_supervisor"]:
        return None, None
    began_ns = exits[1]["boottime_ns"]
    verdict_ms = (stopping.at.ToNanoseconds() - wall_ns - began_ns) / 1e6
    return verdict_ms, (exits[0]["boottime_ns"] - began_ns) / 1e6


def table(outcomes: Iterable[Outcome]) -> str:
    """Return right / tie / wrong per way and place, and the times' medians and worst."""
    outcomes = list(outcomes)
    counts = Counter((each.way, each.place, each.verdict) for each in outcomes)
    lines = [f"{'':12} {SAME:>20} {OTHER:>20}   (right / tie / wrong)"]
    for way in WAYS:
        cells = ["/".join(str(counts[way, place, what]) for what in ("right", "tie", "wrong")) for place in PLACES]
        lines.append(f"{way:12} {cells[0]:>20} {cells[1]:>20}")
    for name, values in (
        ("exit to verdict", sorted(each.verdict_ms for each in outcomes if each.verdict_ms is not None)),
        ("exit to peer's end", sorted(each.stopped_ms for each in outcomes if each.stopped_ms is not None)),
    ):
        lines.append(f"{name}: median {values[len(values) // 2]:.0f} ms, worst {values[-1]:.0f} ms of {len(values)}")
    return "\n".join(lines)
