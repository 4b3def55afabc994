"""The store's tables, with the impossible made impossible, and how frozen data becomes rows and back.

Nested data is kept as JSON in one column; what a query or a constraint needs has a column of its own. Called by
`store` alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from piped.core.model import (
    Attempt,
    AttemptState,
    Backoff,
    Cordon,
    Drain,
    Failure,
    FailureReason,
    Job,
    JobSpec,
    JobState,
    Moment,
    Node,
    NodeState,
    Quarantine,
    RankPlacement,
    Refusal,
    Slot,
    Worker,
    WorkerReport,
    WorkerState,
)

VERSION = 8

# Of version 1; a new store is brought up by MIGRATIONS like an old one.
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE nodes (
  node_id TEXT PRIMARY KEY, node_name TEXT NOT NULL, host_key TEXT NOT NULL, incarnation INTEGER NOT NULL,
  state TEXT NOT NULL, version TEXT NOT NULL, data_address TEXT NOT NULL, metrics_address TEXT NOT NULL,
  slots TEXT NOT NULL) STRICT;
CREATE UNIQUE INDEX one_live_node_per_name ON nodes (node_name) WHERE state != 'lost';
CREATE TABLE jobs (
  job_id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, spec TEXT NOT NULL, payload BLOB NOT NULL,
  submit_seq INTEGER NOT NULL UNIQUE, submitted_s REAL NOT NULL, pending_reason TEXT NOT NULL,
  attempt INTEGER NOT NULL, fence INTEGER NOT NULL, aborts INTEGER NOT NULL, started_s REAL, finished_s REAL,
  failure TEXT, event_seq INTEGER NOT NULL) STRICT;
CREATE UNIQUE INDEX one_live_job_per_name ON jobs (name) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE TABLE submissions (
  request_id TEXT PRIMARY KEY, spec_hash TEXT NOT NULL, job_id TEXT NOT NULL REFERENCES jobs, at_s REAL NOT NULL) STRICT;
CREATE TABLE attempts (
  fence INTEGER PRIMARY KEY, job_id TEXT NOT NULL REFERENCES jobs, attempt INTEGER NOT NULL, state TEXT NOT NULL,
  created_s REAL NOT NULL, prepared_nodes TEXT NOT NULL, store_endpoint TEXT NOT NULL, plan BLOB NOT NULL,
  stop_trigger TEXT NOT NULL, outcome TEXT, grace_s REAL NOT NULL, verdict TEXT, UNIQUE (job_id, attempt)) STRICT;
CREATE UNIQUE INDEX one_live_attempt_per_job ON attempts (job_id)
  WHERE state NOT IN ('succeeded', 'failed', 'cancelled', 'aborted');
CREATE TABLE placements (
  fence INTEGER NOT NULL REFERENCES attempts, rank INTEGER NOT NULL, replica INTEGER NOT NULL, stages TEXT NOT NULL,
  node_id TEXT NOT NULL REFERENCES nodes, node_name TEXT NOT NULL, slot TEXT NOT NULL, PRIMARY KEY (fence, rank)) STRICT;
CREATE TABLE reservations (
  node_id TEXT NOT NULL REFERENCES nodes, slot_index INTEGER NOT NULL, fence INTEGER NOT NULL REFERENCES attempts,
  PRIMARY KEY (node_id, slot_index)) STRICT;
CREATE TABLE workers (
  fence INTEGER NOT NULL REFERENCES attempts, rank INTEGER NOT NULL, state TEXT NOT NULL, pid INTEGER NOT NULL,
  starttime INTEGER NOT NULL, has_joined INTEGER NOT NULL, is_done INTEGER NOT NULL, done_step INTEGER NOT NULL,
  done_loss REAL NOT NULL, report TEXT, exit_code INTEGER, exit_signal INTEGER, by_supervisor INTEGER NOT NULL,
  failed_boottime_ns INTEGER NOT NULL, log_tail TEXT NOT NULL, PRIMARY KEY (fence, rank)) STRICT;
CREATE TABLE events (
  event_seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, name TEXT NOT NULL, reason TEXT NOT NULL, job_id TEXT NOT NULL,
  node_name TEXT NOT NULL) STRICT;
CREATE INDEX events_of_job ON events (job_id, event_seq);
CREATE TABLE artifacts (sha256 TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, at_s REAL NOT NULL) STRICT;
"""

MIGRATIONS = {  # the statements that bring a store from the version before to this one
    2: """
ALTER TABLE nodes ADD COLUMN cordon TEXT;
ALTER TABLE nodes ADD COLUMN "drain" TEXT;
DROP INDEX one_live_node_per_name;
CREATE UNIQUE INDEX one_live_node_per_name ON nodes (node_name) WHERE state NOT IN ('lost', 'fenced');
DROP INDEX one_live_attempt_per_job;
CREATE UNIQUE INDEX one_live_attempt_per_job ON attempts (job_id)
  WHERE state NOT IN ('succeeded', 'failed', 'cancelled', 'aborted', 'preempted')
""",
    3: "ALTER TABLE jobs ADD COLUMN earmark TEXT NOT NULL DEFAULT '[]'",
    4: "ALTER TABLE nodes ADD COLUMN labels TEXT NOT NULL DEFAULT '{}'",
    5: """
ALTER TABLE nodes ADD COLUMN strikes TEXT NOT NULL DEFAULT '[]';
ALTER TABLE nodes ADD COLUMN quarantine TEXT
""",
    6: """
ALTER TABLE jobs ADD COLUMN refusals TEXT NOT NULL DEFAULT '[]';
ALTER TABLE jobs ADD COLUMN restarts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN backoff TEXT
""",
    7: """
ALTER TABLE jobs ADD COLUMN tenant TEXT NOT NULL DEFAULT 'default';
UPDATE jobs SET tenant = coalesce(json_extract(spec, '$.tenant'), 'default');
DROP INDEX one_live_job_per_name;
CREATE UNIQUE INDEX one_live_job_per_name ON jobs (tenant, name) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE TABLE submissions_of_tenants (
  tenant TEXT NOT NULL, request_id TEXT NOT NULL, spec_hash TEXT NOT NULL, job_id TEXT NOT NULL REFERENCES jobs,
  at_s REAL NOT NULL, PRIMARY KEY (tenant, request_id)) STRICT;
INSERT INTO submissions_of_tenants SELECT tenant, request_id, spec_hash, job_id, at_s FROM submissions JOIN jobs USING (job_id);
DROP TABLE submissions;
ALTER TABLE submissions_of_tenants RENAME TO submissions
""",
    8: """
ALTER TABLE workers ADD COLUMN oom_killed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN failed_moment TEXT
""",
}

Row = dict[str, Any]


def node_row(node: Node) -> Row:
    row = {name: getattr(node, name) for name in ("node_id", "node_name", "host_key", "incarnation", "version")}
    row |= {"data_address": node.data_address, "metrics_address": node.metrics_address, "state": node.state.value}
    row["labels"] = json.dumps(dict(node.labels))
    row |= {"strikes": json.dumps(node.strikes), "quarantine": _json(node.quarantine)}
    row |= {"cordon": _json(node.cordon), "drain": _json(node.drain)}
    return row | {"slots": json.dumps([asdict(each) for each in node.slots])}


def node_from(row: Row) -> Node:
    slots = tuple(Slot(**each) for each in json.loads(row["slots"]))
    row |= {"state": NodeState(row["state"]), "slots": slots, "labels": tuple(json.loads(row["labels"]).items())}
    row["cordon"] = Cordon(**json.loads(row["cordon"])) if row["cordon"] else None
    row["drain"] = Drain(**json.loads(row["drain"])) if row["drain"] else None
    row["strikes"] = tuple(json.loads(row["strikes"]))
    row["quarantine"] = Quarantine(**json.loads(row["quarantine"])) if row["quarantine"] else None
    return Node(**row)


def job_row(job: Job) -> Row:
    spec = asdict(job.spec)
    payload = spec.pop("payload")
    scalars = ("job_id", "submit_seq", "submitted_s", "pending_reason", "attempt", "fence", "aborts", "event_seq")
    row = {name: getattr(job, name) for name in (*scalars, "restarts", "started_s", "finished_s")}
    row |= {"refusals": json.dumps([asdict(each) for each in job.refusals]), "backoff": _json(job.backoff)}
    row |= {
        "tenant": job.spec.tenant,
        "name": job.spec.name,
        "state": job.state.value,
        "spec": json.dumps(spec),
        "payload": payload,
    }
    return row | {"failure": _json(job.failure), "earmark": json.dumps(job.earmark)}


def job_from(row: Row) -> Job:
    row = dict(row)
    del row["name"], row["tenant"]  # which are the spec's
    spec = json.loads(row["spec"])
    spec["env"] = tuple((name, value) for name, value in spec["env"])
    spec["node_selector"] = tuple((name, value) for name, value in spec.get("node_selector", ()))
    spec["stages_of_ranks"] = tuple(spec.get("stages_of_ranks", ()))  # absent in a job stored before there were any
    row["spec"] = JobSpec(**spec, payload=row.pop("payload"))
    row["refusals"] = tuple(Refusal(**each) for each in json.loads(row["refusals"]))
    row["backoff"] = Backoff(**json.loads(row["backoff"])) if row["backoff"] else None
    row["earmark"] = tuple((node_id, index) for node_id, index in json.loads(row["earmark"]))
    return Job(**{**row, "state": JobState(row["state"]), "failure": _failure_from(row["failure"])})


def attempt_row(attempt: Attempt) -> Row:
    scalars = ("fence", "job_id", "attempt", "created_s", "store_endpoint", "plan", "stop_trigger", "grace_s")
    row = {name: getattr(attempt, name) for name in scalars}
    row |= {"state": attempt.state.value, "outcome": attempt.outcome.value if attempt.outcome else None}
    return row | {
        "prepared_nodes": json.dumps(sorted(attempt.prepared_nodes)),
        "verdict": _json(attempt.verdict),
    }


def attempt_from(row: Row, placement: tuple[RankPlacement, ...], workers: tuple[Worker, ...]) -> Attempt:
    return Attempt(
        **{
            **row,
            "state": AttemptState(row["state"]),
            "outcome": AttemptState(row["outcome"]) if row["outcome"] else None,
            "prepared_nodes": frozenset(json.loads(row["prepared_nodes"])),
            "verdict": _failure_from(row["verdict"]),
            "placement": placement,
            "workers": workers,
        }
    )


def placement_row(fence: int, placed: RankPlacement) -> Row:
    row = {name: getattr(placed, name) for name in ("rank", "replica", "node_id", "node_name")}
    return row | {"fence": fence, "stages": json.dumps(placed.stages), "slot": json.dumps(asdict(placed.slot))}


def placement_from(row: Row) -> RankPlacement:
    row = {name: value for name, value in row.items() if name != "fence"}
    return RankPlacement(**{**row, "stages": tuple(json.loads(row["stages"])), "slot": Slot(**json.loads(row["slot"]))})


def worker_row(fence: int, worker: Worker) -> Row:
    scalars = ("rank", "pid", "starttime", "done_step", "done_loss", "exit_code", "exit_signal", "failed_boottime_ns")
    row = {name: getattr(worker, name) for name in (*scalars, "log_tail")}
    if math.isnan(worker.done_loss):  # a forward job has no loss, and SQLite makes NULL of nan
        row["done_loss"] = -math.inf
    row |= {"fence": fence, "state": worker.state.value}
    return row | {
        "has_joined": int(worker.has_joined),
        "is_done": int(worker.is_done),
        "by_supervisor": int(worker.by_supervisor),
        "oom_killed": int(worker.oom_killed),
        "failed_moment": _json(worker.failed_moment),
        "report": _json(worker.report),
    }


def worker_from(row: Row) -> Worker:
    row = {name: value for name, value in row.items() if name != "fence"}
    return Worker(
        **{
            **row,
            "state": WorkerState(row["state"]),
            "done_loss": math.nan if row["done_loss"] == -math.inf else row["done_loss"],
            "has_joined": bool(row["has_joined"]),
            "is_done": bool(row["is_done"]),
            "by_supervisor": bool(row["by_supervisor"]),
            "oom_killed": bool(row["oom_killed"]),
            "failed_moment": Moment(**json.loads(row["failed_moment"])) if row["failed_moment"] else None,
            "report": WorkerReport(**json.loads(row["report"])) if row["report"] else None,
        }
    )


def _json(value: Backoff | Cordon | Drain | Quarantine | Failure | Moment | WorkerReport | None) -> str | None:
    return json.dumps(asdict(value)) if value else None


def _failure_from(text: str | None) -> Failure | None:
    if not text:
        return None
    fields = json.loads(text)
    return Failure(**{**fields, "reason": FailureReason(fields["reason"]), "stages": tuple(fields["stages"])})
