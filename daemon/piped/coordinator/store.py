"""The durable state: SQLite in one directory that one process holds, written by one thread.

A commit writes the difference between two states and the log lines in one transaction, and returns when it is on
disk. `open_store` raises the epoch. Called by `engine` (commit), `services` (events) and `server` (open, close).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from piped.coordinator import schema
from piped.core import invariants
from piped.core.model import Artifact, Attempt, RankPlacement, Record, State, Submission, Worker
from piped.errors import NodeError, StateDirHeld, UnavailableError

T = TypeVar("T")

SUBMISSION_KEPT_S = 48 * 3600.0
EVENTS_KEPT_S = 7 * 24 * 3600.0
MAX_EVENTS = 1_000_000  # kept
PRUNE_ROWS = 10_000  # per transaction, so that commits need not wait long


def hold(state_dir: Path) -> int:
    """Lock the directory for this process and return the descriptor to keep open.

    Raises StateDirHeld naming the process that has it.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StateDirHeld(
            f"state directory {state_dir} is held by the coordinator with pid {text or 'unknown'}; stop it first, "
            "or give this one another state_dir",
            pid=int(text) if text.isdigit() else 0,
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


class Store:
    """One SQLite file. Every method runs on the writer thread and is awaited from the loop."""

    def __init__(self, state_dir: Path, *, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._path = state_dir / "coordinator.db"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._db: sqlite3.Connection | None = None
        self.pruned_event_seq = 0  # no older event is kept, nor this one

    async def open(self, now_s: float) -> State:
        """Create or open the file, count the epoch up, and return the state.

        Raises NodeError for a newer schema, a file that is no store and a disk that refuses.
        """
        try:
            return await self._call(self._open, now_s)
        except sqlite3.DatabaseError as error:
            raise NodeError(
                f"{self._path} can't be opened ({error}); free space in its directory, or put a backup in its place"
            ) from error

    async def commit(self, before: State, after: State, records: Iterable[Record]) -> None:
        """Make `after` durable. Raises UnavailableError when the disk refuses; nothing is written then."""
        await self._call(self._commit, before, after, tuple(records))

    async def events(self, job_id: str, from_event_seq: int, limit: int) -> list[Record]:
        """Return log lines from `from_event_seq` on, oldest first; an empty `job_id` means all."""
        return await self._call(self._events, job_id, from_event_seq, limit)

    async def prune(self, now_s: float) -> int:
        """Delete events that are too old or too many; return how many. Raises UnavailableError when the disk refuses."""
        total = 0
        while count := await self._call(self._prune, now_s):
            total += count
        return total

    async def close(self) -> None:
        """Checkpoint and close the file, and end the thread."""
        await self._call(self._close)
        self._thread.shutdown()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._db is not None, "the store is not open"
        return self._db

    def _open(self, now_s: float) -> State:
        self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._path.chmod(0o600)
        self._db.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self._db.execute(f"PRAGMA {pragma}")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > schema.VERSION:
            raise NodeError(
                f"{self._path} has schema {version}, this program knows {schema.VERSION}; start the newer program"
            )
        if 0 < version < schema.VERSION:
            self._back_up(version)
        with self._transaction() as db:
            if version == 0:
                _execute(db, schema.TABLES)
                start = {"cluster_id": str(uuid.uuid4()), "epoch": "0", "event_seq": "0", "last_fence": "0"}
                db.executemany("INSERT INTO meta VALUES (?, ?)", start.items())
            for number in range(max(1, version) + 1, schema.VERSION + 1):
                _execute(db, schema.MIGRATIONS[number])
            db.execute(f"PRAGMA user_version = {schema.VERSION}")
            db.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'epoch'")
            db.execute("DELETE FROM submissions WHERE at_s < ?", (now_s - SUBMISSION_KEPT_S,))
        while self._prune(now_s):
            pass
        state = self._load()
        invariants.check(state)
        return state

    def _back_up(self, version: int) -> None:
        """Keep the file as it was beside it. A copy from an earlier try is replaced: nothing was migrated then."""
        copy = self._path.with_suffix(f".db.v{version}")
        copy.unlink(missing_ok=True)
        try:
            self._connection.execute("VACUUM INTO ?", (str(copy),))
        except sqlite3.OperationalError as error:
            raise NodeError(
                f"{self._path} has schema {version} and must be migrated to {schema.VERSION}, but its backup {copy} "
                f"can't be written ({error}); free space there and start again"
            ) from error
        copy.chmod(0o600)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _rows(self, query: str, *arguments: object) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in self._connection.execute(query, arguments))

    def _load(self) -> State:
        meta = {row["key"]: row["value"] for row in self._rows("SELECT * FROM meta")}
        self.pruned_event_seq = int(meta.get("pruned_event_seq", 0))
        placements: dict[int, list[RankPlacement]] = {}
        for row in self._rows("SELECT * FROM placements ORDER BY fence, rank"):
            placements.setdefault(row["fence"], []).append(schema.placement_from(row))
        workers: dict[int, list[Worker]] = {}
        for row in self._rows("SELECT * FROM workers ORDER BY fence, rank"):
            workers.setdefault(row["fence"], []).append(schema.worker_from(row))
        attempts = (
            schema.attempt_from(row, tuple(placements[row["fence"]]), tuple(workers[row["fence"]]))
            for row in self._rows("SELECT * FROM attempts ORDER BY fence")
        )
        jobs = [schema.job_from(row) for row in self._rows("SELECT * FROM jobs ORDER BY submit_seq")]
        return State(
            cluster_id=meta["cluster_id"],
            epoch=int(meta["epoch"]),
            event_seq=int(meta["event_seq"]),
            last_fence=int(meta["last_fence"]),
            nodes={row["node_id"]: schema.node_from(row) for row in self._rows("SELECT * FROM nodes")},
            jobs={each.job_id: each for each in jobs},
            live_names={each.spec.key: each.job_id for each in jobs if not each.is_terminal},
            attempts={each.fence: each for each in attempts},
            reservations={
                (row["node_id"], row["slot_index"]): row["fence"] for row in self._rows("SELECT * FROM reservations")
            },
            submissions={
                (row["tenant"], row["request_id"]): Submission(**row) for row in self._rows("SELECT * FROM submissions")
            },
            artifacts={row["sha256"]: Artifact(**row) for row in self._rows("SELECT * FROM artifacts")},
        )

    def _commit(self, before: State, after: State, records: tuple[Record, ...]) -> None:
        try:
            with self._transaction() as db:
                _write(db, before, after)
                _insert(db, "events", [asdict(each) for each in records])
        except sqlite3.OperationalError as error:  # a full disk, an I/O error: the next commit may succeed
            raise UnavailableError(
                f"the store can't be written ({error}); free space under {self._path.parent}"
            ) from error

    def _events(self, job_id: str, from_event_seq: int, limit: int) -> list[Record]:
        where = "event_seq >= ? AND job_id = ?" if job_id else "event_seq >= ? AND ? = ''"
        query = f"SELECT * FROM events WHERE {where} ORDER BY event_seq LIMIT ?"
        return [Record(**row) for row in self._rows(query, from_event_seq, job_id, limit)]

    def _prune(self, now_s: float) -> int:
        """Delete the oldest of the events that need not be kept any more; return how many."""
        kept_from = self._connection.execute(
            "SELECT max(coalesce((SELECT min(event_seq) FROM events WHERE at_s >= ?), newest + 1), coalesce(("
            "SELECT event_seq FROM events ORDER BY event_seq DESC LIMIT 1 OFFSET ?), 0)) "
            "FROM (SELECT coalesce(max(event_seq), 0) AS newest FROM events)",
            (now_s - EVENTS_KEPT_S, self._max_events - 1),
        ).fetchone()[0]
        last = self._connection.execute(
            "SELECT max(event_seq) FROM (SELECT event_seq FROM events WHERE event_seq < ? ORDER BY event_seq LIMIT ?)",
            (kept_from, PRUNE_ROWS),
        ).fetchone()[0]
        if last is None:
            return 0
        try:
            with self._transaction() as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('pruned_event_seq', ?)", (str(last),))
                count = db.execute("DELETE FROM events WHERE event_seq <= ?", (last,)).rowcount
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"old events can't be deleted ({error})") from error
        self.pruned_event_seq = last
        return count

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _execute(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)


def _write(db: sqlite3.Connection, before: State, after: State) -> None:
    """Write what differs, in an order that keeps every constraint true at every statement."""
    for key in ("epoch", "event_seq", "last_fence"):
        db.execute("UPDATE meta SET value = ? WHERE key = ?", (str(getattr(after, key)), key))
    freed = [key for key in before.reservations if after.reservations.get(key) != before.reservations[key]]
    db.executemany("DELETE FROM reservations WHERE node_id = ? AND slot_index = ?", freed)
    nodes = sorted(_changed(before.nodes, after.nodes), key=lambda each: not each.is_gone)
    _upsert(db, "nodes", ("node_id",), [schema.node_row(each) for each in nodes])
    jobs = sorted(_changed(before.jobs, after.jobs), key=lambda each: not each.is_terminal)
    _upsert(db, "jobs", ("job_id",), [schema.job_row(each) for each in jobs])
    attempts = sorted(_changed(before.attempts, after.attempts), key=lambda each: not each.is_terminal)
    _upsert(db, "attempts", ("fence",), [schema.attempt_row(each) for each in attempts])
    for attempt in attempts:
        _write_ranks(db, before.attempts.get(attempt.fence), attempt)
    taken = [(*key, fence) for key, fence in after.reservations.items() if before.reservations.get(key) != fence]
    db.executemany("INSERT INTO reservations VALUES (?, ?, ?)", taken)
    submissions = [asdict(each) for each in _changed(before.submissions, after.submissions)]
    _upsert(db, "submissions", ("tenant", "request_id"), submissions)
    _upsert(db, "artifacts", ("sha256",), [asdict(each) for each in _changed(before.artifacts, after.artifacts)])


def _write_ranks(db: sqlite3.Connection, before: Attempt | None, attempt: Attempt) -> None:
    if before is None:
        _insert(db, "placements", [schema.placement_row(attempt.fence, each) for each in attempt.placement])
    known = before.workers if before is not None else (None,) * len(attempt.workers)
    changed = [now for was, now in zip(known, attempt.workers, strict=True) if was is not now]
    _upsert(db, "workers", ("fence", "rank"), [schema.worker_row(attempt.fence, each) for each in changed])


def _changed(before: Mapping[Any, T], after: Mapping[Any, T]) -> list[T]:
    return [] if before is after else [each for key, each in after.items() if before.get(key) is not each]


def _insert(db: sqlite3.Connection, table: str, rows: list[schema.Row]) -> None:
    if rows:
        names = ", ".join(rows[0])
        marks = ", ".join(f":{name}" for name in rows[0])
        db.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)


def _upsert(db: sqlite3.Connection, table: str, keys: tuple[str, ...], rows: list[schema.Row]) -> None:
    if rows:
        names = ", ".join(rows[0])
        marks = ", ".join(f":{name}" for name in rows[0])
        updates = ", ".join(f"{name} = excluded.{name}" for name in rows[0] if name not in keys)
        db.executemany(
            f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {updates}",
            rows,
        )
