"""Jobs whose workers are scripts without torch: what is tested is who starts, keeps and ends them, not what they compute."""

import json
import sqlite3
import sys
from pathlib import Path

from tests.support.cluster import TERMINAL, wait_until

SCRIPT = Path(__file__).parents[2] / "integration" / "node" / "workers" / "scripted.py"
ENDED = "('succeeded', 'failed', 'cancelled', 'aborted', 'preempted')"


def acts(cluster, name, act, *, ranks=1, **more):
    """Return a job file whose workers do `act` of scripted.py; `until_file` reports steps until `let_go`."""
    python = cluster.folder / "python"
    if not python.exists():
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SCRIPT}"\n')
        python.chmod(0o755)
    return {
        "version": 1,
        "name": name,
        "program": "none:Needed",
        "params": {"act": act},
        "python": str(python),
        "pipeline": {"stages": ranks, "chunks": ranks},
        "train": {"steps": 10},
        **more,
    }


def let_go(cluster, job_id, code=0):
    """Have the workers that act `until_file` exit with `code`."""
    for folder in cluster.attempt_dirs(job_id):
        (folder / "go.tmp").write_text(str(code))
        (folder / "go.tmp").rename(folder / "go")


def running(cluster, job_id):
    """Wait until the job runs; return its workers' (pid, starttime) by rank, as the store has them."""
    cluster.wait_for(job_id, "RUNNING")
    query = "SELECT rank, pid, starttime FROM workers JOIN jobs USING (fence) WHERE job_id = ?"
    return {rank: (pid, starttime) for rank, pid, starttime in rows(cluster, query, job_id)}


def is_alive(pid, starttime):
    """Say whether that very process lives."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = text.rpartition(")")[2].split()
    return fields[0] != "Z" and int(fields[19]) == starttime


def rows(cluster, query, *values):
    """Return what the coordinator's store answers, read beside it."""
    store = sqlite3.connect(f"file:{cluster.coordinator.folder / 'coordinator.db'}?mode=ro", uri=True)
    try:
        return store.execute(query, values).fetchall()
    finally:
        store.close()


def check_invariants(cluster):
    """What must hold after any fault, once no job is live: in the store, and in /proc for what the store started."""
    cluster.check_no_leak()
    assert rows(cluster, "SELECT * FROM reservations") == []
    assert rows(cluster, f"SELECT fence, state FROM attempts WHERE state NOT IN {ENDED}") == []
    twice = "SELECT job_id FROM attempts GROUP BY job_id, attempt HAVING count(*) > 1"
    assert rows(cluster, twice) == []
    started = rows(cluster, "SELECT fence, rank, pid, starttime FROM workers WHERE pid > 0")
    assert [each for each in started if is_alive(*each[2:])] == []
    assert len({each[2:] for each in started}) == len(started), "one process in two ranks"


def node_named(cluster, name):
    """Return what the coordinator says of a node."""
    return next(node for node in cluster.api.nodes() if node.node_name == name)


def event(cluster, job_id, name):
    """Wait for an event of the job; return its reason."""
    return wait_until(lambda: cluster.events(job_id, name), 20, f"{name} of {job_id}")[-1].reason


def first_failure(cluster, job_id):
    """Wait for the end of the job's first attempt, end what follows; return (reason, node, message) of the verdict."""
    query = f"SELECT verdict FROM attempts WHERE job_id = ? AND state IN {ENDED} ORDER BY attempt"
    ((text,), *_) = wait_until(lambda: rows(cluster, query, job_id), 20, "the end of the first attempt")
    cluster.pipectl("cancel", job_id)
    wait_until(lambda: cluster.state(job_id) in TERMINAL, 20, "the end of the job")
    verdict = json.loads(text)
    return verdict["reason"], verdict["node_name"], verdict["message"]


def attempt_dir(cluster, job_id, node="node*"):
    """Return the directory of the job's newest attempt on a node."""
    files = cluster.folder.glob(f"{node}/attempts/*/attempt.json")
    found = [file.parent for file in files if json.loads(file.read_text())["job_id"] == job_id]
    return max(found, key=lambda path: int(path.name))
