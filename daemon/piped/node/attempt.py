"""One attempt on this node: what its shim says becomes facts, progress and samples; what is wanted becomes lines.

Decides nothing: piped.node.reconcile does, through piped.node.supervisor, which owns the attempts and their tasks.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from typing import Any, Protocol

import structlog

from piped.lines import VERSION, Message
from piped.node.attempt_dir import AttemptDir
from piped.node.facts import FactBook
from piped.node.model import DesiredAttempt, Fact, FactKey, Observed, RankPlacement, Shim
from piped.node.orders import Place, start_message
from piped.node.shim_link import ShimLink

log = structlog.get_logger()

# What a worker's or shim's line is called as a fact.
FACT_OF_LINE = {
    "spawned": "spawned",
    "exited": "exited",
    "store": "store_listening",
    "joined": "joined",
    "plan": "planned",
    "failed": "worker_failed",
    "done": "worker_done",
    "unkillable": "unkillable",
}
_LINE_OF_FACT = {fact: line for line, fact in FACT_OF_LINE.items()}


class Meter(Protocol):
    """Where samples and exits go: piped.node.metrics."""

    def take_samples(self, job_id: str, fence: int, rank: int, samples: list[dict[str, Any]]) -> None:
        """Take a rank's cumulative samples."""

    def count_exit(self, job_id: str, fence: int, rank: int, reason: str) -> None:
        """Count the end of a worker."""


class Attempt:
    """The state of one attempt here. Only the supervisor's loop touches it."""

    def __init__(self, directory: AttemptDir, job_id: str, book: FactBook, meter: Meter) -> None:
        self.directory = directory
        self.fence = directory.fence
        self.job_id = job_id
        self.shim = Shim.NEVER
        self.preparation_failed = False
        self.is_launching = False  # from here on a shim may exist
        self.process: subprocess.Popen[bytes] | None = None
        self.link: ShimLink | None = None
        self.started: set[int] = set()
        self.exited: set[int] = set()
        self.told_grace_s: float | None = None
        self.progress: dict[int, dict[str, Any]] = {}
        self._heard_s: dict[int, float] = {}  # when a running rank was last heard of; on the loop's clock
        self._shim_heard_s = 0.0
        self._passed: dict[int, str] = {}  # rank -> endpoint, over the current link
        self._book = book
        self._meter = meter

    def observed(self) -> Observed:
        """Return the attempt as reconcile sees it."""
        acknowledged = all(self._book.is_acknowledged((self.fence, rank, "exited")) for rank in self.exited)
        return Observed(
            fence=self.fence,
            job_id=self.job_id,
            shim=self.shim,
            preparation_failed=self.preparation_failed,
            started=frozenset(self.started),
            exited=frozenset(self.exited),
            exits_acknowledged=acknowledged,
            told_grace_s=self.told_grace_s,
        )

    def silences(self) -> list[tuple[int, float]]:
        """Return for how long each running rank has told its shim nothing. While that one itself says nothing, nobody knows."""
        return [(rank, max(0.0, self._shim_heard_s - heard_s)) for rank, heard_s in self._heard_s.items()]

    def forget_ranks(self) -> None:
        """Nobody tells any more where the ranks are."""
        self.progress.clear()
        self._heard_s.clear()

    def report(self, rank: int | None, kind: str, body: Mapping[str, Any] | None = None, at_ns: int = 0) -> None:
        """Put a fact into the book, once."""
        moment = at_ns or time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if self._book.put(Fact(self.fence, rank, kind, moment, body or {})):
            log.info(kind, job_id=self.job_id, fence=self.fence, rank=rank, **_loggable(kind, body or {}))

    def read_records(self) -> None:
        """Take over what the disk says of started and ended ranks."""
        self.started |= self.directory.started_ranks()
        for rank, record in self.directory.exit_records().items():
            for line, message in (record.get("messages") or {}).items():
                self._report_line(rank, line, message, int(record.get("boottime_ns", 0)))
            self._end_rank(rank, record)

    # --- to the shim

    def start_ranks(self, desired: DesiredAttempt, ranks: tuple[RankPlacement, ...], place: Place) -> None:
        """Tell the shim to start `ranks`. Raises ValueError, and starts none, when one's assignment is too long."""
        for message in self.starts(desired, ranks, place):
            self._say(message)
        self.started |= {placement.rank for placement in ranks}

    def starts(self, desired: DesiredAttempt, ranks: tuple[RankPlacement, ...], place: Place) -> list[Message]:
        """Return the lines that start `ranks`, one each: an assignment of a large job is long. Raises as above."""
        return [start_message(desired, placement, self.directory, place) for placement in ranks]

    def pass_endpoint(self, ranks: tuple[int, ...], endpoint: str) -> None:
        """Tell each rank, once per connection, where the store is."""
        for rank in ranks:
            if self._passed.get(rank) != endpoint:
                self._passed[rank] = endpoint
                message = {"type": "endpoint", "endpoint": endpoint}
                self._say({"type": "forward", "rank": rank, "message": message})

    def stop(self, grace_s: float, *, dumps_stacks: bool = False) -> None:
        """Tell the shim to stop everything."""
        self.told_grace_s = grace_s
        self._say({"type": "stop", "grace_s": grace_s, "dumps_stacks": dumps_stacks})

    def dismiss(self) -> None:
        """Tell the shim to leave."""
        self._say({"type": "quit"})

    def acknowledge(self, key: FactKey) -> None:
        """Tell the shim that it may forget a message."""
        _, rank, kind = key
        if rank is not None and kind in _LINE_OF_FACT:
            self._say({"type": "ack", "keys": [[rank, _LINE_OF_FACT[kind]]]})

    def _say(self, message: Message) -> None:
        if self.link is not None:  # without one the next connection begins with what is wanted then
            self.link.send(message)

    # --- from the shim

    def connected(self, link: ShimLink) -> None:
        """A connection stands; its hello follows."""
        self.link = link
        self.told_grace_s = None
        self._passed.clear()

    def disconnected(self) -> None:
        """The connection is gone; whether the shim is, is not known yet."""
        self.link = None
        if self.shim is Shim.CONNECTED:
            self.shim = Shim.STARTING

    def take(self, message: Message) -> bool:
        """Take one line of the shim; say whether it may change what is to be done."""
        self._shim_heard_s = time.monotonic()
        match message["type"]:
            case "alive":
                return False
            case "hello":
                self._hello(message)
            case "spawned" | "exited":
                rank = int(message["rank"])
                if message["type"] == "exited":
                    self._end_rank(rank, message)
                else:
                    self.started.add(rank)
                    self._heard_s.setdefault(rank, time.monotonic())
                    body = {"pid": message["pid"], "starttime": message["starttime"]}
                    self.report(rank, "spawned", body, message["boottime_ns"])
            case "unkillable":
                self.report(int(message["rank"]), "unkillable", at_ns=int(message["boottime_ns"]))
            case "worker":
                return self._worker(int(message["rank"]), message["message"], int(message["boottime_ns"]))
        return True

    def _hello(self, message: Message) -> None:
        if message["version"] != VERSION:
            log.warning("shim_version_differs", fence=self.fence, shim=message["version"], daemon=VERSION)
        self.started = {int(rank) for rank in message["ranks"]}
        self.shim = Shim.CONNECTED
        records = self.directory.exit_records()
        for number, state in message["ranks"].items():
            self._heard_s.setdefault(int(number), time.monotonic())
            if state["state"] == "exited":  # the record says more; without one (full disk) the hello must do
                self._end_rank(int(number), records.get(int(number)) or state)

    def _worker(self, rank: int, message: Message, at_ns: int) -> bool:
        self._heard_s[rank] = time.monotonic()
        match message["type"]:
            case "metrics":
                self._meter.take_samples(self.job_id, self.fence, rank, message["samples"])
            case "progress" | "beat":
                self.progress.setdefault(rank, {}).update(message)
            case line if line in FACT_OF_LINE:
                self._report_line(rank, line, message, at_ns)
                return True
        return False

    def _report_line(self, rank: int, line: str, message: Message, at_ns: int) -> None:
        body = {key: value for key, value in message.items() if key != "type"}
        self.report(rank, FACT_OF_LINE[line], body, at_ns)

    def _end_rank(self, rank: int, record: Mapping[str, Any]) -> None:
        self.started.add(rank)
        if rank in self.exited:
            return
        self.exited.add(rank)
        self.progress.pop(rank, None)
        self._heard_s.pop(rank, None)
        names = ("code", "signal", "by_supervisor", "oom_killed", "log_tail")
        body = {name: record[name] for name in names if record.get(name) is not None}
        self.report(rank, "exited", body, int(record.get("boottime_ns") or 0))
        self._meter.count_exit(self.job_id, self.fence, rank, exit_reason(body))


def exit_reason(body: Mapping[str, Any]) -> str:
    """Return a bounded word for a worker's end: a label of piped_worker_exits_total."""
    if body.get("oom_killed"):
        return "oom_killed"
    if body.get("by_supervisor"):
        return "stopped"
    if body.get("signal") is not None:
        return f"signal_{body['signal']}"
    return "success" if body.get("code") == 0 else "error"


def _loggable(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"pid", "code", "signal", "by_supervisor", "oom_killed", "endpoint", "message", "step", "peer_rank"}
    return {key: value for key, value in body.items() if key in shown}
