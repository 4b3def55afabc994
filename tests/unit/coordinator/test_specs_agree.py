"""The coordinator's rules for a spec and those of the job file are the same rules."""

from __future__ import annotations

import itertools
import json

import pytest

from pipeapi import jobproto, jobspec, values
from pipeapi import schedules as ours
from pipeapi.v1 import cluster_pb2, nodes_pb2
from piped import wire
from piped.core import schedules as theirs
from piped.core import specs
from piped.errors import SpecError
from piped.node import convert
from piped.node.attempt_dir import AttemptDir
from piped.node.orders import Place, start_message
from stagekit.errors import ScheduleError
from stagekit.plan.actions import to_csv
from stagekit.plan.schedules.registry import NAMES as NAMES_THAT_RUN
from stagekit.plan.schedules.registry import compute_order, stage_table, table_for
from tests.unit.core.build import spec

NAMES = ["gpt", "a", "a.b-c", "a" * 63, "a" * 64, "A", "a_b", "-a", "a-", "", "a b", "é"]
ENV = ["A", "A_1", "_A", "a", "1A", "A-B", "", "LD_X", "PYTHONPATH", "GRPC_X", "PIPED_X", "MASTER_ADDR", "BASH_FUNC_x"]
ENV += ["RANK", "RANKS", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_X", "OMP_NUM_THREADS"]


def is_good(**changes):
    try:
        specs.check(spec(**changes))
    except SpecError:
        return False
    return True


def text(name="gpt"):
    return f"version: 1\nname: {name!r}\nprogram: a.b:C\npipeline: {{stages: 2}}\ntrain: {{steps: 1}}\n".encode()


@pytest.mark.parametrize("name", NAMES)
def test_both_take_the_same_job_names(name):
    try:
        jobspec.load_text(text(name), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(name=name)
    else:
        assert is_good(name=name)


@pytest.mark.parametrize("value", ["", "x" * 131_000, "x" * 131_065, "x" * 131_066, "x\0"])
@pytest.mark.parametrize("name", ENV)
def test_both_take_the_same_environment(name, value):
    try:
        values.check_env(name, value)
    except ValueError:
        assert not is_good(env=((name, value),))
    else:
        assert is_good(env=((name, value),))


@pytest.mark.parametrize("seconds", [0, 1, 600, 86_400, 86_401])
def test_both_take_the_same_start_timeouts(seconds):
    try:
        jobspec.load_text(text() + f"recovery: {{start_timeout: {seconds}}}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(start_timeout_s=seconds)
    else:
        assert is_good(start_timeout_s=seconds)


@pytest.mark.parametrize("seconds", [1, 86_400, 86_401])
def test_both_take_the_same_hang_timeouts(seconds):
    try:
        jobspec.load_text(text() + f"recovery: {{hang_timeout: {seconds}}}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(hang_timeout_s=seconds)
    else:
        assert is_good(hang_timeout_s=seconds)


@pytest.mark.parametrize("restarts", [0, 1000, 1001])
def test_both_take_the_same_numbers_of_restarts(restarts):
    try:
        jobspec.load_text(text() + f"recovery: {{restarts: {restarts}}}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(restarts=restarts)
    else:
        assert is_good(restarts=restarts)


@pytest.mark.parametrize("priority", [-1001, -1000, 0, 1000, 1001])
def test_both_take_the_same_priorities(priority):
    try:
        job = jobspec.load_text(text() + f"priority: {priority}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(priority=priority)
    else:
        assert wire.spec_from_proto(jobproto.to_proto(job, environ={})).priority == priority
        assert is_good(priority=priority)


@pytest.mark.parametrize(
    "label", ["gpu=h100", "a=", "a/b.c-d_e=1", "=x", "-a=x", "a=-", "a b=x", "a=é", "a" * 64 + "=x"]
)
def test_both_take_the_same_labels_and_they_travel(label):
    name, value = label.split("=")
    try:
        job = jobspec.load_text(
            text() + f"resources: {{node_selector: {{{name!r}: {value!r}}}}}\n".encode(), "job.yaml"
        )
    except jobspec.SpecError:
        assert not is_good(node_selector=((name, value),))
    else:
        message = jobproto.to_proto(job, environ={})
        assert jobproto.from_proto(message).resources.node_selector == {name: value}
        assert wire.spec_from_proto(message).node_selector == ((name, value),)
        assert is_good(node_selector=((name, value),))


@pytest.mark.parametrize("tenant", NAMES)
def test_both_take_the_same_tenants(tenant):
    try:
        job = jobspec.load_text(text() + f"tenant: {tenant!r}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(tenant=tenant)
    else:
        assert wire.spec_from_proto(jobproto.to_proto(job, environ={})).tenant == tenant
        assert is_good(tenant=tenant)


def message_of(num_bytes, letter):
    """Return a good job that takes `num_bytes` as JSON, filled with `letter` in its environment and params."""
    message = jobproto.to_proto(jobspec.load_text(text() + b"params: {t: ''}\n", "job.yaml"), environ={})
    message.env["LONG"] = letter * 1000
    room, step = num_bytes - jobproto.json_bytes(message), len(json.dumps(letter)) - 2
    message.params["t"].string_value = letter * (room // step) + "x" * (room % step)
    assert jobproto.json_bytes(message) == num_bytes
    return message


@pytest.mark.parametrize("letter", ["x", "é", "\n", "\x01", "𝄞"])
def test_both_take_the_same_number_of_bytes_for_a_whole_job(letter):
    message = message_of(jobspec.MAX_SPEC_BYTES, letter)
    jobproto.to_proto(jobproto.from_proto(message), environ={})
    specs.check(wire.spec_from_proto(message))
    message = message_of(jobspec.MAX_SPEC_BYTES + 1, letter)
    told = "the job: takes 262145 bytes as JSON; the limit is 262144"
    with pytest.raises(jobspec.SpecError, match=told):
        jobproto.to_proto(jobproto.from_proto(message), environ={})
    with pytest.raises(SpecError, match=told):
        specs.check(wire.spec_from_proto(message))


def test_the_longest_job_fits_into_the_line_that_starts_a_rank(tmp_path):
    message = message_of(jobspec.MAX_SPEC_BYTES, "é")
    cpu = cluster_pb2.Slot(index=0, device="cuda:7", uuid="GPU-" + "0" * 36)
    ranks = [
        nodes_pb2.RankPlacement(rank=r, stages=[r], node_id="n" * 36, node_name="node-0001", slot=cpu)
        for r in range(specs.MAX_RANKS)
    ]
    wanted = nodes_pb2.DesiredAttempt(
        job_id="j" * 36, fence=1, attempt=1, phase=nodes_pb2.PHASE_RUN, spec=message, ranks=ranks
    )
    (attempt,) = convert.desired_state(nodes_pb2.DesiredState(attempts=[wanted]), 1).attempts
    place = Place("n" * 36, "node-0001", "10.0.0.1", "eth0")
    start_message(attempt, attempt.ranks[0], AttemptDir(tmp_path, 1), place)


AUTO_JOBS = [
    ("auto", 1, "auto", True), ("auto", 2, 8, True), ("auto", 4, "auto", True), ("1f1b", 1, "auto", True), ("zb-v", 2, "auto", True),
    ("dualpipe-v", 2, "auto", True), ("zb-v", 1, "auto", False), ("1f1b", 2, "auto", False), ("auto", [3, 1], 8, False),
    ("gpipe", [3, 1], "auto", False), ("forward", 1, "auto", False), ("automatic", 1, 8, False), ("auto", 3, 8, False),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "per_rank", "chunks", "fits"), AUTO_JOBS)
def test_both_take_the_same_jobs_that_leave_a_choice(schedule, per_rank, chunks, fits):
    pipeline = {"stages": 4, "stages_per_rank": per_rank, "schedule": schedule, "chunks": chunks}
    raw = text().replace(b"{stages: 2}", json.dumps(pipeline).encode())
    try:
        job = jobspec.load_text(raw, "job.yaml")
    except jobspec.SpecError:
        assert not fits
    else:
        message = jobproto.to_proto(job, environ={})
        assert fits and jobproto.to_dict(message)["pipeline"]["chunks"] == chunks
        assert jobproto.from_proto(message) == job
    listed = tuple(per_rank) if isinstance(per_rank, list) else ()
    number = chunks if isinstance(chunks, int) else 0
    wanted = {"stages": 4, "stages_per_rank": 1 if listed else per_rank, "stages_of_ranks": listed}
    assert is_good(schedule=schedule, chunks=number, **wanted) == fits


def test_client_coordinator_and_library_know_the_same_schedules():
    assert ours.SCHEDULES == theirs.SCHEDULES == NAMES_THAT_RUN


def can_run(schedule, stages, ranks, chunks):
    try:
        compute_order(schedule, table_for(schedule, stages, ranks), ranks, chunks)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_a_job_is_refused_for_just_the_numbers_that_its_schedule_cannot_run(schedule):
    for stages, per_rank, chunks in itertools.product(range(1, 9), range(1, 5), (1, 3, 4, 8)):
        if stages % per_rank == 0:
            unfit = ours.misfit(schedule, stages, per_rank, chunks)
            assert unfit == theirs.misfit(schedule, stages, per_rank, chunks)
            assert (unfit is None) == can_run(schedule, stages, stages // per_rank, chunks), (stages, per_rank, chunks)


BLOCKS = [(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (1, 3, 2)]


@pytest.mark.parametrize("per_rank", BLOCKS)
@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_unequal_numbers_of_stages_are_refused_for_just_the_schedules_that_cannot_run_them(schedule, per_rank):
    stages = sum(per_rank)
    for chunks in (1, 8):
        unfit = ours.blocks_misfit(schedule, stages, per_rank, chunks)
        assert unfit == theirs.blocks_misfit(schedule, stages, per_rank, chunks)
        table = stage_table(schedule, stages, per_rank)
        try:
            compute_order(schedule, table, len(per_rank), chunks)
        except ScheduleError:
            assert unfit is not None
        else:
            assert unfit is None
            placed = [theirs.stages_of(schedule, stages, len(per_rank), r, per_rank) for r in range(len(per_rank))]
            assert placed == [tuple(s for s, rank in enumerate(table) if rank == r) for r in range(len(per_rank))]


@pytest.mark.parametrize("schedule", NAMES_THAT_RUN)
def test_all_read_the_same_table_out_of_a_schedule_file(schedule, tmp_path):
    per_rank = 2 if schedule in ours.V_SHAPED else 1
    table = table_for(schedule, 2 * per_rank, 2)
    text = to_csv(compute_order(schedule, table, 2, 5), overlapped=True)
    (tmp_path / "mine.csv").write_text(text)
    assert ours.csv_forwards(text) == theirs.csv_forwards(text) == (table, 2, 5)
    assert stage_table(str(tmp_path / "mine.csv"), 2 * per_rank, 1) == table
    placed = [theirs.stages_of("mine.csv", len(table), 2, rank, (), text) for rank in range(2)]
    assert placed == [tuple(s for s, r in enumerate(table) if r == rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("text", "numbers", "told"),
    [
        ("0F0,0B0\n1F0,1B0\n", (2, (), 1), None),
        ("0F0,0B0\n\n1F0,1B0\n", (3, (), 1), ("stages", "write stages: 2")),
        ("0F0,0B0\n1F0,1B0\n", (2, (), 4), ("chunks", "write chunks: 1")),
        ("0F0,1F0\n2F0\n", (3, (1, 2), 1), ("stages_per_rank", "has [2, 1]; leave it out")),
        ("0F0,0B0\n2F0,2B0\n", (3, (), 1), ("schedule", "no forward of stage 1")),
        ("0F0,0B0\n0SEND_F0\n", (1, (), 1), ("schedule", "no forward in line 2")),
        ("hello", (1, (), 1), ("schedule", "no forward of stage 0")),
        ("99999999999F0", (1, (), 1), ("schedule", "no forward of stage 0")),
    ],
)
def test_a_schedule_file_for_other_numbers_is_refused_by_both_with_what_to_write(text, numbers, told):
    stages, per_rank, chunks = numbers
    unfit = ours.csv_misfit(text, stages, per_rank, chunks)
    assert unfit == theirs.csv_misfit(text, stages, per_rank, chunks)
    assert (unfit is None) if told is None else (unfit[0] == told[0] and told[1] in unfit[1])
    changes = {"schedule": "mine.csv", "schedule_csv": text, "stages": stages, "chunks": chunks}
    assert is_good(**changes, stages_of_ranks=per_rank) == (told is None)


def test_a_schedule_file_without_its_text_is_refused_and_so_is_text_under_a_name():
    assert not is_good(schedule="mine.csv")
    assert not is_good(schedule="gpipe", schedule_csv="0F0,0B0\n1F0,1B0\n")


@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_the_coordinator_places_the_stages_where_the_library_runs_them(schedule):
    for stages, per_rank in itertools.product(range(1, 9), (1, 2, 4)):
        ranks = stages // per_rank
        if stages % per_rank == 0 and ours.misfit(schedule, stages, per_rank, 16) is None:
            table = table_for(schedule, stages, ranks)
            placed = [theirs.stages_of(schedule, stages, ranks, rank) for rank in range(ranks)]
            assert placed == [tuple(s for s in range(stages) if table[s] == rank) for rank in range(ranks)]
