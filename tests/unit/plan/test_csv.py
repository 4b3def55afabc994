"""The text form: ours and torch.distributed.pipelining's are read by each other."""

import csv
import io

import pytest
from torch.distributed.pipelining import schedules as torchs

from stagekit.errors import ScheduleError
from stagekit.plan.actions import Action, Op, from_csv, parse_action, to_csv
from stagekit.plan.costs import Costs
from stagekit.plan.routes import Routes
from stagekit.plan.schedules import csv_file
from stagekit.plan.schedules.registry import NAMES, compute_order, table_for
from stagekit.plan.transports import Transport
from stagekit.plan.trial import try_lists
from stagekit.plan.verify import verify
from tests.unit.plan.cases import compute, lowered, rich_routes, table


@pytest.mark.parametrize("schedule", NAMES)
def test_lists_survive_their_text_form(schedule):
    stage_ranks = table(schedule, 3)
    lists, *_ = lowered(schedule, 3, 6, routes=rich_routes(schedule, len(stage_ranks), stage_ranks))
    assert from_csv(to_csv(lists)) == lists


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("2I7", Action(Op.I, 2, 7)),
        ("2W7", Action(Op.W, 2, 7)),
        ("3SEND_F1", Action(Op.SEND_F, 3, 1, 4)),
        ("3RECV_F1", Action(Op.RECV_F, 3, 1, 2)),
        ("0SEND_F2>3", Action(Op.SEND_F, 0, 2, 3)),
        ("12B45", Action(Op.B, 12, 45)),
    ],
)
def test_actions_read_as_torch_writes_them(text, action):
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 1", "-1F0", "2F0>1", "0REDUCE0>1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="no action"):
        parse_action(text)


def test_a_bad_cell_is_told_with_its_rank_and_place():
    with pytest.raises(ScheduleError, match=r'rank 1, cell 2: "1Q0" is no action'):
        from_csv("0F0,0B0\n1F0,,1Q0\n")


class _NoProcesses(torchs._PipelineScheduleRuntime):
    """torch's schedule without stages and process group: only what reads and writes CSV files."""

    def __init__(self, ranks, stages, chunks):
        self.pp_group_size, self._num_stages, self._n_microbatches = ranks, stages, chunks
        self.pipeline_order, self._stages, self._defer_pp_recv = {}, [], False
        self.stage_index_to_group_rank = {}


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "forward"])
def test_torch_loads_and_lowers_what_is_written_here(schedule, tmp_path):
    stage_ranks = table(schedule, 3)
    orders = compute_order(schedule, stage_ranks, 3, 6)
    (tmp_path / "ours.csv").write_text(to_csv(orders))
    theirs = _NoProcesses(3, len(stage_ranks), 6)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    assert [[str(a) for a in theirs.pipeline_order[rank]] for rank in range(3)] == [[str(a) for a in r] for r in orders]
    assert all(len(theirs.pipeline_order_with_comms[rank]) > len(orders[rank]) for rank in range(3))


def torch_lists(kind, ranks, chunks):
    """Return torch's own compute lists as its CSV."""
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches = ranks, chunks
    schedule.n_local_stages, schedule._num_stages, schedule.num_stages = 2, 2 * ranks, 2 * ranks
    schedule.number_of_rounds = max(1, chunks // ranks)
    schedule.microbatches_per_round = chunks // schedule.number_of_rounds
    schedule._n_local_stages, schedule._stages = 2, [None, None]
    text = io.StringIO()
    csv.writer(text).writerows(schedule._calculate_single_rank_operations(rank) for rank in range(ranks))
    return text.getvalue()


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (torchs.ScheduleLoopedBFS, "bfs"),
        (torchs.ScheduleInterleaved1F1B, "interleaved"),
        (torchs.ScheduleZBVZeroBubble, "zb-v"),
        (torchs.ScheduleDualPipeV, "dualpipe-v"),
    ],
)
def test_torchs_own_schedules_load_and_run_here(kind, ours):
    lists = from_csv(torch_lists(kind, 4, 8))
    assert csv_file.table_of(lists) == table_for(ours, 8, 4)
    trial = try_lists(lists, Costs.unit(8), transport=Transport.RENDEZVOUS)
    assert trial.timeline.makespan >= 48


@pytest.mark.parametrize(
    ("kind", "ours"), [(torchs.ScheduleInterleaved1F1B, "interleaved"), (torchs.ScheduleDualPipeV, "dualpipe-v")]
)
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 12)])
def test_interleaved_and_dualpipe_v_are_torchs_action_for_action(kind, ours, ranks, chunks):
    theirs = from_csv(torch_lists(kind, ranks, chunks))
    assert theirs == compute_order(ours, table_for(ours, 2 * ranks, ranks), ranks, chunks)


def test_an_overlapped_pair_is_read_as_its_two_actions_and_can_be_written():
    orders = compute_order("dualpipe-v", table_for("dualpipe-v", 4, 2), 2, 5)
    text = to_csv(orders, overlapped=True)
    assert "(0F3;3B1)OVERLAP_F_B" in text
    assert from_csv(text) == orders
    pair = torchs._Action.from_str("(0F3;3B1)OVERLAP_F_B")
    assert [str(action) for action in pair.sub_actions] == ["0F3", "3B1"]


def test_torchs_actions_for_sharded_parameters_and_its_bubbles_are_skipped():
    assert from_csv("0UNSHARD,,0F0,0B0,0REDUCE_GRAD,0RESHARD\n") == ((Action(Op.F, 0, 0), Action(Op.B, 0, 0)),)


def test_torchs_lowered_lists_are_taken_as_they_are(tmp_path):
    orders = compute_order("1f1b", (0, 1, 2), 3, 5)
    (tmp_path / "ours.csv").write_text(to_csv(orders))
    theirs = _NoProcesses(3, 3, 5)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    theirs._dump_csv(str(tmp_path / "theirs.csv"))
    lists = csv_file.load(str(tmp_path / "theirs.csv"))
    verify(lists, (0, 1, 2), 5, Routes.chain(3), transport=Transport.ORDERED)


def test_a_csv_file_is_a_schedule_by_its_path(tmp_path):
    path = str(tmp_path / "mine.csv")
    lists, stage_ranks, routes = lowered("zb-v", 2, 4)
    (tmp_path / "mine.csv").write_text(to_csv(lists))
    assert table_for(path, 4, 2) == stage_ranks
    assert list(map(list, compute_order(path, stage_ranks, 2, 4))) == [compute(row) for row in lists]
    with pytest.raises(ScheduleError, match=r"is for 4 chunks, not for 6"):
        compute_order(path, stage_ranks, 2, 6)
    with pytest.raises(ScheduleError, match=r"is for 4 stages on 2 ranks, not for 3 on 3"):
        table_for(path, 3, 3)
    with pytest.raises(ScheduleError, match=r"nothing.csv: .*give a readable CSV file"):
        compute_order(str(tmp_path / "nothing.csv"), (0,), 1, 1)
    del routes


@pytest.mark.parametrize(("text", "words"), [("\n", "holds no action"), ("0F0\n2F0\n", "stage 1 has no action")])
def test_a_file_that_can_be_no_schedule_is_refused(tmp_path, text, words):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ScheduleError, match=words):
        csv_file.table_of(csv_file.load(str(tmp_path / "bad.csv")))
