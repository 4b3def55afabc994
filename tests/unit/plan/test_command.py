"""`python -m stagekit.plan`: what it prints, and its exit status."""

import json
import subprocess
import sys

import pytest

from stagekit.plan.__main__ import main
from stagekit.plan.actions import from_csv
from stagekit.plan.schedules.registry import NAMES, SCHEDULES, placement
from stagekit.plan.transports import Transport
from tests.unit.plan.cases import lowered

PAPER = "--ranks 8 --chunks 24 --forward 18.522 --input-grad 18.086 --weight-grad 9.337 --hop 0.601"


@pytest.fixture
def run(capsys):
    """Return what runs the command and gives back (exit status, stdout, stderr)."""

    def command(line, *more):
        try:
            status = main([*line.split(), *map(str, more)])
        except SystemExit as stopped:  # argparse
            status = stopped.code
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_the_module_runs_without_a_model_or_torch():
    line = f"--schedule zb-h1 {PAPER} --json"
    code = "import runpy, sys; runpy.run_module('stagekit.plan', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert round(json.loads(done.stdout)["bubble_span"], 4) == 0.1585


@pytest.mark.parametrize("schedule", NAMES)
def test_json_says_what_it_costs_and_what_each_rank_does(run, schedule):
    status, out, _ = run(f"--schedule {schedule} --ranks 2 --chunks 4 --json")
    document = json.loads(out)
    assert status == 0 and document["deadlock"] is None
    assert document["makespan"] >= document["cost"] > 0 and 0 <= document["bubble"] < 1
    assert len(document["actions"]) == len(document["peak_chunks"]) == 2
    each = SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1
    assert sum(text.count("F") and "_" not in text for row in document["actions"] for text in row) == 2 * each * 4


@pytest.mark.parametrize("transport", [transport.value for transport in Transport])
def test_every_transport_may_be_asked_for(run, transport):
    status, out, _ = run(f"--schedule zb-v --ranks 2 --chunks 4 --hop 0.1 --transport {transport} --json")
    assert status == 0 and json.loads(out)["makespan"] >= 25


def test_the_timeline_is_what_is_shown_unless_asked_otherwise(run):
    status, out, _ = run("--schedule 1f1b --ranks 2 --chunks 4 --width 40")
    assert status == 0
    assert out.splitlines()[0].startswith("1f1b: 2 stages on 2 ranks, 4 chunks: makespan 15, bubble 20.0%")
    assert out.splitlines()[1].startswith("rank  0 │0")
    assert run("--schedule 1f1b --ranks 2 --chunks 4 --width 40 --gantt")[1] == out


def test_what_csv_writes_load_reads_and_costs_the_same(run, tmp_path):
    line = "--forward 2 --hop 0.5"
    for more in ("", " --transfers"):
        _, text, _ = run(f"--schedule zb-v --ranks 2 --chunks 4 --csv{more}")
        assert ("SEND" in text) == bool(more)
        (tmp_path / "mine.csv").write_text(text)
        _, theirs, _ = run(f"{line} --json --load", tmp_path / "mine.csv")
        _, ours, _ = run(f"{line} --json --schedule zb-v --ranks 2 --chunks 4")
        assert json.loads(theirs)["makespan"] == json.loads(ours)["makespan"]
    assert len(from_csv(text)) == 2


def test_a_file_says_itself_what_runs_where_and_leaves_no_rank_idle(run, tmp_path):
    (tmp_path / "idle.csv").write_text("0F0,0B0\n,,\n")
    status, _, err = run("--load", tmp_path / "idle.csv")
    assert status == 1 and "nothing for rank 1 to compute" in err
    for flag in ("--placement 1,0", "--stages-per-rank 7", "--memory-limit 1"):
        status, _, err = run(f"{flag} --load", tmp_path / "idle.csv")
        assert status != 0 and "a file says itself what runs where" in err


def test_pictures_are_written_to_files(run, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    status, out, _ = run("--schedule gpipe --ranks 2 --chunks 2 --chrome-trace", trace, "--svg", picture)
    assert status == 0 and "makespan" in out and "│" not in out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")
    assert run("--schedule gpipe --ranks 2 --chunks 2 --svg", tmp_path / "no" / "where")[0] == 2


def test_a_bad_schedule_exits_1_with_the_grid_and_an_arrow(run, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n")
    status, out, err = run("--load", tmp_path / "bad.csv")
    assert status == 1 and not out
    assert "1B1 comes before 1F1" in err and "→1B1" in err and "rank   0" in err
    assert run("--ranks 2 --chunks 2 --schedule", tmp_path / "bad.csv") == (1, "", err)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,1F1\n1F0,1F1,1B0,1B1,0F1,0B1\n", "1F1: stage 1 is on rank 1"),
        ("0F0,0B0,0X1\n", 'rank 0, cell 2: "0X1" is no action'),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no action"),
        ("0B0,0F0\n1F0,1B0\n", "→0B0"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "0B1 is missing"),
    ],
)
def test_each_mistake_in_a_file_is_told_where_it_is(run, tmp_path, text, words):
    (tmp_path / "bad.csv").write_text(text)
    status, _, err = run("--load", tmp_path / "bad.csv")
    assert status == 1 and words in err


def test_a_deadlock_exits_1_and_the_document_holds_the_cycle(run, tmp_path):
    lists, *_ = lowered("1f1b", 3, 6)
    (tmp_path / "hoisted.csv").write_text("\n".join(",".join(map(str, row)) for row in lists))
    assert run("--load", tmp_path / "hoisted.csv")[0] == 0
    status, out, err = run("--json --transport ordered --load", tmp_path / "hoisted.csv")
    document = json.loads(out)
    assert status == 1 and document["makespan"] is None and document["bubble"] is None
    assert len(document["deadlock"]) > 1 and document["deadlock"][0] in err and "→" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "give --schedule, --ranks and --chunks, or --load FILE.csv"),
        ("--schedule gpipe --chunks 2", "give --schedule, --ranks and --chunks"),
        ("--schedule zigzag --ranks 2 --chunks 2", '"zigzag" is unknown; there are gpipe'),
        ("--schedule 1F1B --ranks 2 --chunks 2", 'did you mean "1f1b"?'),
        ("--schedule 1f1b --ranks 4 --chunks 8 --memory-limit 2", "--memory-limit is for zb-auto"),
        ("--schedule gpipe --placement 0,1 --chunks 2 --stages-per-rank 5", "leave --stages-per-rank out"),
        ("--schedule dualpipe-v --ranks 4 --chunks 5", "use at least 8, or zb-v"),
        ("--schedule 1f1b --ranks 2 --chunks 2 --stages-per-rank 2", "use gpipe, bfs or interleaved"),
        ("--schedule zb-v --ranks 2 --chunks 2 --stages-per-rank 1", "use stages_per_rank: 2"),
        ("--schedule gpipe --ranks 0 --chunks 2", "--ranks 0"),
        ("--schedule gpipe --ranks 2 --chunks 0", "chunks is 0; at least 1"),
        ("--schedule gpipe --ranks 2 --chunks 2 --forward x", "--forward x: not a number"),
        ("--schedule gpipe --ranks 2 --chunks 2 --forward 1,2,3", "one for each of the 2 stages"),
        ("--schedule gpipe --ranks 2 --chunks 2 --hop nan", "--hop nan: numbers are at least 0"),
        ("--schedule gpipe --ranks 2 --chunks 2 --kept 2", "--kept 2: a share, from 0 to 1"),
        ("--schedule gpipe --ranks 2 --chunks 2 --hop 1,2", "--hop 1,2: give one number"),
        ("--schedule gpipe --ranks 2 --chunks 2 --stages-per-rank 0", "--stages-per-rank 0: each is at least 1"),
        ("--schedule gpipe --ranks 3 --chunks 2 --stages-per-rank 2,1", "2,1 is for 2 ranks, but --ranks is 3"),
        ("--schedule gpipe --ranks 2 --chunks 2 --stages-per-rank two", "give a number, or one for each rank"),
        ("--schedule auto --ranks 2 --chunks 2", "chooses on what a model was measured to cost: pipectl plan job.yaml"),
        ("--schedule gpipe --ranks 2 --chunks 2 --width 0", "--width 0: at least 1"),
        ("--schedule zb-auto --ranks 2 --chunks 2 --memory-limit nan", "--memory-limit nan"),
        ("--schedule gpipe --ranks 2 --chunks 2 --window soon", "--window soon"),
        ("--schedule gpipe --ranks 2 --chunks 2 --transport pigeon", "invalid choice: 'pigeon'"),
        ("--schedule gpipe --ranks 3 --chunks 2 --placement 0,1,0", "is for 2 ranks, but --ranks is 3"),
        ("--schedule gpipe --chunks 2 --placement 0,2", "each of the 3 ranks needs at least one stage"),
        ("--schedule gpipe --chunks 2 --placement 0,-1", "--placement 0,-1"),
        ("--schedule zb-auto --ranks 2 --chunks 2 --memory-limit 0.5", "a memory limit of 0.5 activations"),
        ("--schedule gpipe --load x.csv", "--schedule and --load"),
        ("--load nowhere.csv", "nowhere.csv: "),
    ],
)
def test_a_request_that_can_not_be_served_exits_2_and_says_what_would_do(run, line, words):
    status, out, err = run(line)
    assert status == 2 and not out
    assert words in err and "Traceback" not in err


def test_costs_may_differ_from_stage_to_stage_and_stages_lie_where_they_are_put(run):
    _, out, _ = run("--schedule zb-auto --placement 0,1,1,0,1 --chunks 4 --forward 1,2,1,2,1 --memory-limit 9 --json")
    document = json.loads(out)
    assert document["stage_ranks"] == [0, 1, 1, 0, 1] and max(document["peak_held"]) <= 9
    assert placement(5, 2) == (0, 1, 0, 1, 0)
