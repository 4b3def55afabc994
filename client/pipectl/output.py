"""What commands print: tables, JSON, YAML. Data goes to stdout, prose to stderr; control characters are escaped."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isnan
from typing import Any

import click
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from pipeapi.v1 import cluster_pb2, jobs_pb2


def note(text: str) -> None:
    """Print prose."""
    click.echo(text, err=True)


_RARE = re.compile(r"[^ -~]")  # what is looked at one by one: a log of 64 MiB takes a second, not twenty


def safe(text: str, *, keep: str = "\n\t") -> str:
    """Escape control and direction characters, which could forge what a terminal shows."""

    def shown(match: re.Match[str]) -> str:
        c = match[0]
        return c if c in keep or unicodedata.category(c) not in ("Cc", "Cf") else c.encode("unicode_escape").decode()

    return _RARE.sub(shown, text)


def clock(node: cluster_pb2.Node) -> str:
    """Return how far the node's clock is from the coordinator's, with the error of that."""
    if not node.HasField("clock_offset_s"):
        return "-"
    return f"{node.clock_offset_s:+.3f}s ±{node.clock_error_s:.3f}s"


def wire(edge: cluster_pb2.NodeEdge) -> str:
    """Return what the wire to another node is like."""
    return f"{edge.node_name} {edge.rtt_s * 1e6:.0f}us {edge.bytes_per_s / 1e6:.0f}MB/s"


def slowest_wire(node: cluster_pb2.Node) -> str:
    """Return the wire of the node that carries least."""
    return wire(min(node.edges, key=lambda edge: edge.bytes_per_s)) if node.edges else "-"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print left-aligned columns."""
    cells = [list(header), *[[safe(str(value), keep="") for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def to_dict(message: Message) -> dict[str, Any]:
    """Return a message as plain values under its proto names; 0, false and empty ones are there, too."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def dump(messages: Sequence[Message], form: str, *, single: bool) -> None:
    """Print messages as JSON or YAML: one document, a list unless `single`."""
    data: Any = [to_dict(message) for message in messages]
    if single:
        data = data[0]
    if form == "json":
        click.echo(json.dumps(data, indent=2))
    else:
        import yaml

        click.echo(yaml.safe_dump(data, sort_keys=False), nl=False)


def state_name(job: jobs_pb2.Job) -> str:
    """Return QUEUED, RUNNING, …"""
    return jobs_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_")


def node_state_name(node: cluster_pb2.Node) -> str:
    """Return READY, LOST, …"""
    return cluster_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_")


def node_flags(node: cluster_pb2.Node) -> str:
    """Return why a node takes no new work, with who, why and when; "open" if it does."""
    flags = []
    for name, flag in (("being drained" if node.attempts else "drained", node.drain), ("cordoned", node.cordon)):
        if flag.who:
            why = f": {flag.why}" if flag.why else ""
            flags.append(f"{name} by {flag.who} {age(flag.at)} ago{why}")
    if node.HasField("quarantine"):
        flags.append(f"in quarantine since {age(node.quarantine.at)}: {node.quarantine.why}")
    if node.HasField("drain"):
        flags.append("empty" if not node.attempts else f"waits for {', '.join(each.name for each in node.attempts)}")
    return safe("; ".join(flags) or "open")


def worker_state_name(worker: jobs_pb2.Worker) -> str:
    """Return JOINED, "EXITED 1", "EXITED SIGKILL", …"""
    name = jobs_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
    if worker.HasField("exit_signal"):
        return f"{name} signal {worker.exit_signal}"
    return f"{name} {worker.exit_code}" if worker.HasField("exit_code") else name


def age(at: Timestamp) -> str:
    """Return how long ago `at` was: 42s, 5m, 3h, 2d; "-" when it is not set."""
    return "-" if not at.seconds else duration(max(0.0, datetime.now(UTC).timestamp() - at.seconds))


def duration(seconds: float) -> str:
    """Return 42s, 5m, 3h, 2d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def size(num_bytes: int) -> str:
    """Return 12.3 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def num_steps(job: jobs_pb2.Job) -> int:
    """Return how many steps the newest attempt has finished, as far as anything tells."""
    failed_in = job.failure.step if job.HasField("failure") else 0
    return max(int(job.progress.step), int(failed_in), 0)


def progress_line(job: jobs_pb2.Job) -> str:
    """Return one line that says where a job is."""
    name = state_name(job)
    if job.state == jobs_pb2.JOB_STATE_BACKOFF:
        left_s = max(0.0, job.retry_at.ToNanoseconds() / 1e9 - datetime.now(UTC).timestamp())
        name = f"{name}, attempt {job.attempt + 1} in {left_s:.0f}s"
    if job.pending_reason:
        return f"{name}: {safe(job.pending_reason)}"
    progress = job.progress
    if progress.step:
        speed = f", {progress.tokens_per_s / 1000:.1f}k tokens/s" if progress.tokens_per_s else ""
        loss = "" if isnan(progress.loss) else f", loss {progress.loss:.4f}"  # a forward job has none
        return f"{name}: step {progress.step}/{progress.steps}{loss}{speed}"
    if job.state in (jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED):
        return f"{name} in step {job.failure.step}" if job.HasField("failure") and job.failure.step >= 0 else name
    joined = sum(worker.state == jobs_pb2.WORKER_STATE_JOINED for worker in job.workers)
    return f"{name}: {joined} of {len(job.workers)} workers joined" if job.workers else name


def failure_text(job: jobs_pb2.Job) -> str:
    """Return why a job failed: reason, the rank that failed first, its traceback or log tail."""
    failure = job.failure
    reason = jobs_pb2.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_")
    who = (
        f"rank {failure.rank} (stages {list(failure.stages)}) on {failure.node_name}"
        if failure.rank >= 0
        else "no rank"
    )
    step = f", step {failure.step}" if failure.step >= 0 else ""
    lines = [f"{reason}: {who}{step}: {failure.message}"]
    if failure.traceback:
        lines.append(failure.traceback.rstrip())
    elif failure.log_tail:
        lines.append(f"its last output:\n{failure.log_tail.rstrip()}")
    return safe("\n".join(lines))
