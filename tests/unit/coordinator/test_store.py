from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
from dataclasses import asdict

import pytest

from piped.coordinator import schema
from piped.coordinator.store import Store, hold
from piped.core import events, machine
from piped.core.effects import WriteRecord
from piped.core.model import WorkerReport
from piped.errors import NodeError, StateDirHeld, UnavailableError
from tests.unit.core.build import Cluster, cluster, registration, spec, submission


async def store_all(store, state, *happened):
    """Apply and commit one event after the other; return the last state."""
    for event in happened:
        after, effects, _ = machine.apply(state, event, now_s=5.0)
        records = [each.record for each in effects if isinstance(each, WriteRecord)]
        await store.commit(state, after, records)
        state = after
    return state


def story():
    """Return events that touch every table."""
    report = WorkerReport("bad", "Traceback", 3, is_transport=True, peer_rank=0)
    return (
        registration("n1", 2, labels=(("gpu", "h100"),)),
        submission("j1", env=(("A", "1"),), payload=b"\x00\x01"),
        events.PlacementDue(),
        events.AttemptPrepared("n1", 1),
        events.StoreListened("n1", 1, "h:1"),
        events.PlanReported("n1", 1, b"plan"),
        events.WorkerSpawned("n1", 1, 0, 77, 9),
        events.WorkerJoined("n1", 1, 0),
        events.WorkerFailed("n1", 1, 1, report, 12),
        events.WorkerExited("n1", 1, 1, None, 9, True, "tail", 13),
        events.AttemptEmptied("n1", 1),
        events.PlacementDue(),
        events.PrepareRefused("n1", 2, "late"),
        events.AttemptEmptied("n1", 2),
        events.PlacementDue(),
        events.PrepareRefused("n1", 3, "late again", is_nodes=True),
        events.AttemptEmptied("n1", 3),
        registration("n2", 1),
        events.CordonRequested("n2", "ann", "why"),
        events.DrainRequested("n2", "ann", "why", 60.0),
        submission("j2", name="second", node_selector=(("gpu", "h100"),)),
        events.PlacementDue(),
        events.ArtifactStored("0" * 64, 7),
    )


def test_what_was_committed_is_loaded_again_as_it_was_but_for_the_epoch(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        state = await store.open(5.0)
        after = await store_all(store, state, *story())
        await store.close()
        again = Store(tmp_path)
        loaded = await again.open(6.0)
        records = await again.events("j1", 0, 100)
        await again.close()
        assert (state.epoch, loaded.epoch) == (1, 2)
        assert loaded.cluster_id == state.cluster_id
        for name in (
            "nodes",
            "jobs",
            "attempts",
            "reservations",
            "submissions",
            "artifacts",
            "event_seq",
            "last_fence",
        ):
            assert getattr(loaded, name) == getattr(after, name), name
        assert records[0].name == "job_submitted"

    asyncio.run(scenario())


def test_a_worker_that_is_done_without_a_loss_is_stored_and_loaded(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        done = (*story()[:8], events.WorkerDone("n1", 1, 0, 3, math.nan))
        await store_all(store, await store.open(5.0), *done)
        await store.close()
        again = Store(tmp_path)
        loaded = await again.open(6.0)
        await again.close()
        (attempt,) = loaded.attempts.values()
        assert (attempt.workers[0].done_step, math.isnan(attempt.workers[0].done_loss)) == (3, True)

    asyncio.run(scenario())


def test_the_database_itself_refuses_two_live_attempts_and_a_slot_in_two_of_them(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        await store_all(store, await store.open(5.0), *story())
        await store.close()
        db = sqlite3.connect(tmp_path / "coordinator.db")
        columns = (
            "job_id, attempt + 1, 'running', created_s, prepared_nodes, store_endpoint, plan, stop_trigger, outcome"
        )
        with pytest.raises(sqlite3.IntegrityError, match=r"attempts\.job_id"):
            db.execute(f"INSERT INTO attempts SELECT 90, {columns}, grace_s, verdict FROM attempts WHERE job_id = 'j2'")
        with pytest.raises(sqlite3.IntegrityError, match=r"reservations\.node_id, reservations\.slot_index"):
            db.execute("INSERT INTO reservations SELECT * FROM reservations")
        db.close()

    asyncio.run(scenario())


def test_a_failed_transaction_leaves_the_earlier_state(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        state = await store.open(5.0)
        good = cluster(2).feed(submission())
        impossible = Cluster(good.state).state
        with pytest.raises(sqlite3.IntegrityError):  # its job is missing
            await store.commit(state, type(state)(**{**_fields(impossible), "jobs": {}}), ())
        await store.close()
        again = Store(tmp_path)
        loaded = await again.open(6.0)
        await again.close()
        assert not loaded.nodes
        assert not loaded.attempts

    asyncio.run(scenario())


def _fields(state):
    return {name: getattr(state, name) for name in state.__dataclass_fields__}


def test_a_newer_schema_is_refused_with_both_versions(tmp_path):
    db = sqlite3.connect(tmp_path / "coordinator.db")
    db.execute("PRAGMA user_version = 99")
    db.close()

    async def scenario():
        store = Store(tmp_path)
        with pytest.raises(NodeError, match=f"schema 99, this program knows {schema.VERSION}"):
            await store.open(5.0)
        await store.close()

    asyncio.run(scenario())


def test_a_file_that_is_no_store_is_refused_and_named(tmp_path):
    (tmp_path / "coordinator.db").write_bytes(b"something else, longer than a page header of SQLite" * 100)

    async def scenario():
        store = Store(tmp_path)
        with pytest.raises(NodeError, match=r"coordinator\.db can't be opened \(file is not a database\)"):
            await store.open(5.0)
        await store.close()

    asyncio.run(scenario())


def test_a_store_of_the_first_version_is_migrated_and_its_copy_is_kept(tmp_path):
    db = sqlite3.connect(tmp_path / "coordinator.db")
    db.executescript(schema.TABLES + "PRAGMA user_version = 1;")
    start = {"cluster_id": "old", "epoch": "7", "event_seq": "0", "last_fence": "0"}
    db.executemany("INSERT INTO meta VALUES (?, ?)", start.items())
    db.execute("INSERT INTO nodes VALUES ('n1', 'n1', 'h', 1, 'lost', '0', 'a', 'm', '[]')")
    db.commit()
    db.close()

    async def scenario():
        store = Store(tmp_path)
        state = await store.open(5.0)
        await store_all(store, state, *story())
        await store.close()
        again = Store(tmp_path)
        loaded = await again.open(6.0)
        await again.close()
        assert (loaded.cluster_id, loaded.epoch) == ("old", 9)
        assert loaded.nodes["n2"].drain is not None
        with sqlite3.connect(tmp_path / "coordinator.db.v1") as copy:
            assert copy.execute("PRAGMA user_version").fetchone() == (1,)
            assert copy.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone() == ("7",)
        copy.close()

    asyncio.run(scenario())


def test_jobs_and_requests_of_an_older_store_become_their_tenants_own(tmp_path):
    db = sqlite3.connect(tmp_path / "coordinator.db")
    for version in range(1, 7):
        db.executescript(schema.TABLES if version == 1 else schema.MIGRATIONS[version])
    start = {"cluster_id": "old", "epoch": "7", "event_seq": "9", "last_fence": "0"}
    db.executemany("INSERT INTO meta VALUES (?, ?)", start.items())
    jobs = {"j1": spec(), "j2": spec(name="next", tenant="b"), "j3": spec(name="old")}
    for number, (job_id, each) in enumerate(jobs.items(), 1):
        fields = {**asdict(each), "payload": None, **({"tenant": None} if job_id == "j3" else {})}
        stored = json.dumps({name: value for name, value in fields.items() if value is not None})
        row = (job_id, each.name, "queued", stored, b"", number, 5.0, "waits", 0, 0, 0, None, None, None, number)
        db.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * 15)}, '[]', '[]', 0, NULL)", row)
        db.execute("INSERT INTO submissions VALUES (?, 'h', ?, 5.0)", (f"r{number}", job_id))
    db.executescript("PRAGMA user_version = 6;")
    db.close()

    async def scenario():
        store = Store(tmp_path)
        state = await store.open(5.0)
        assert dict(state.live_names) == {("default", "gpt"): "j1", ("b", "next"): "j2", ("default", "old"): "j3"}
        assert {key: each.job_id for key, each in state.submissions.items()} == {
            ("default", "r1"): "j1",
            ("b", "r2"): "j2",
            ("default", "r3"): "j3",
        }
        await store_all(store, state, events.CancelRequested("j1"), submission("j4", tenant="b"), submission("j5"))
        await store.close()

    asyncio.run(scenario())


def test_a_held_directory_names_its_holder_and_is_free_after_it(tmp_path):
    first = hold(tmp_path)
    with pytest.raises(StateDirHeld) as refused:
        hold(tmp_path)
    assert refused.value.pid == os.getpid()
    os.close(first)
    os.close(hold(tmp_path))


def test_the_store_can_be_read_by_its_owner_alone(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        await store.open(5.0)
        await store.close()
        assert (tmp_path / "coordinator.db").stat().st_mode & 0o077 == 0

    asyncio.run(scenario())


def test_a_full_disk_is_told_as_unavailable_and_the_next_commit_may_succeed(tmp_path):
    async def scenario():
        store = Store(tmp_path)
        state = await store.open(5.0)
        after, _, _ = machine.apply(state, submission(payload=b"x" * 100_000), now_s=5.0)
        await store._call(lambda: store._connection.execute("PRAGMA max_page_count = 1"))  # SQLITE_FULL from here on
        with pytest.raises(UnavailableError, match="free space under"):
            await store.commit(state, after, ())
        await store._call(lambda: store._connection.execute("PRAGMA max_page_count = 100000"))
        await store.commit(state, after, ())
        await store.close()
        again = Store(tmp_path)
        assert list((await again.open(6.0)).jobs) == ["j1"]
        await again.close()

    asyncio.run(scenario())
