"""pipectl without a coordinator: help, errors, pictures, and what it must not import."""

import json
import re
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from pipeapi.v1 import jobs_pb2
from pipectl import api, jobfile, output, pictures
from pipectl.__main__ import COMMANDS, main
from pipectl.pictures import Span

NOT_IMPORTED = """
import sys, importlib
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked in this test")
sys.meta_path.insert(0, Refuse())
{code}
"""


def python(code, blocked=()):
    return subprocess.run(
        [sys.executable, "-c", NOT_IMPORTED.format(blocked=set(blocked), code=code)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_command_has_a_help_page_and_imports_no_torch():
    lines = "\n".join(
        f"m = importlib.import_module('pipectl.commands.{module}'); m.{name}.get_help"
        for name, (module, _) in COMMANDS.items()
    )
    done = python(lines + "\nassert 'torch' not in sys.modules", blocked=["torch"])
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, name


def test_help_imports_neither_grpc_nor_rich_nor_pydantic():
    code = "from pipectl.__main__ import main\nmain(['--help'], standalone_mode=False)\n"
    code += "assert not {'grpc', 'rich', 'pydantic', 'torch', 'yaml'} & set(sys.modules), set(sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code", ["import pipectl.api, pipectl.jobfile", "import stagekit, stagekit.api, stagekit.testing"]
)
def test_client_and_library_import_without_modules_that_only_linux_has(code):
    blocked = ["fcntl", "termios", "pwd", "grp", "resource"] if "pipectl" in code else []  # torch needs some of them
    hide = "import select\nfor n in ('epoll', 'EPOLLIN'): delattr(select, n) if hasattr(select, n) else None\n"
    done = python(hide + code, blocked)
    assert done.returncode == 0, done.stderr


def test_an_unreachable_coordinator_is_told_within_a_second_with_exit_4():
    for address in ("127.0.0.1:1", "nowhere.invalid:7400"):
        done = subprocess.run(
            [sys.executable, "-m", "pipectl", "--coordinator", address, "get", "jobs"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 4, done.stderr
        assert f"no coordinator at {address}" in done.stderr
    assert api.CONNECT_S < 1


def test_a_command_that_does_not_exist_suggests_one_that_does():
    result = CliRunner().invoke(main, ["submti"])
    assert result.exit_code == 2
    assert 'did you mean "submit"?' in result.output


def test_all_bad_files_are_told_with_exit_2(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("version: 1\nname: a\nprogram: a:B\npipeline: {stages: 1}\ntrain: {steps: 1}\n")
    bad.write_text("version: 1\nname: a\n")
    result = CliRunner().invoke(main, ["validate", str(bad), str(good), str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    for part in ("program: missing", f"{good}: ok", "can't read the job file: No such file"):
        assert part in result.output


def test_the_example_of_the_schema_command_is_a_good_job_file(tmp_path):
    example = tmp_path / "job.yaml"
    example.write_text(CliRunner().invoke(main, ["schema", "--example"]).output)
    result = CliRunner().invoke(main, ["validate", str(example)])
    assert result.exit_code == 0, result.output


def test_the_packed_source_depends_on_its_content_alone(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "program.py").write_text("x = 1\n")
        (tmp_path / name / "__pycache__" / f"{name}.pyc").write_text(name)
    assert jobfile.pack(tmp_path / "one") == jobfile.pack(tmp_path / "two")


def test_control_characters_of_a_worker_can_not_forge_the_terminal():
    assert output.safe("a\x1b[31mred\r\u202eb") == "a\\x1b[31mred\\r\\u202eb"


def test_a_curve_shows_its_ends():
    picture = pictures.curve([5.0, 4.0, 3.0, 2.0], width=4, height=2)
    assert "5.000" in picture and "2.000" in picture
    assert pictures.curve([1.0]) and pictures.curve([1.0, 1.0])


def test_a_gantt_has_a_line_per_rank_with_forwards_backwards_and_bubbles():
    spans = [Span(0, "F", 0, 0.0, 1.0), Span(1, "F", 0, 1.0, 2.0), Span(1, "B", 0, 2.0, 4.0), Span(0, "B", 0, 4.0, 6.0)]
    assert pictures.gantt(spans, width=6).splitlines() == ["  rank 0 │0···aa│", "  rank 1 │·0aa··│"]
    assert pictures.busy_share(spans) == pytest.approx(0.5)
    assert "nothing" in pictures.gantt([])


def test_a_failure_names_its_rank_once():
    failure = jobs_pb2.Failure(
        reason=jobs_pb2.FAILURE_REASON_SIGNALLED,
        rank=1,
        stages=[1],
        node_name="n1",
        step=-1,
        message="killed by signal 9",
    )
    job = jobs_pb2.Job(state=jobs_pb2.JOB_STATE_FAILED, failure=failure)
    assert output.failure_text(job) == "SIGNALLED: rank 1 (stages [1]) on n1: killed by signal 9"


def test_a_job_in_backoff_tells_which_attempt_comes_when_and_why():
    job = jobs_pb2.Job(state=jobs_pb2.JOB_STATE_BACKOFF, attempt=2, pending_reason="attempt 2 failed: rank 0 on n1: x")
    job.retry_at.FromSeconds(int(time.time()) + 30)
    line = output.progress_line(job)
    assert re.fullmatch(r"BACKOFF, attempt 3 in (29|30)s: attempt 2 failed: rank 0 on n1: x", line), line


def test_a_failed_job_is_listed_at_the_step_that_it_failed_in_though_nobody_reports_progress_any_more():
    job = jobs_pb2.Job(state=jobs_pb2.JOB_STATE_FAILED, failure=jobs_pb2.Failure(step=2))
    assert output.num_steps(job) == 2
    job.progress.step = 3
    assert output.num_steps(job) == 3
    assert output.num_steps(jobs_pb2.Job(failure=jobs_pb2.Failure(step=-1))) == 0


def test_json_shows_what_is_zero_false_or_empty(capsys):
    output.dump([jobs_pb2.Job(job_id="j1")], "json", single=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["attempt"], shown["pending_reason"], shown["workers"]) == (0, "", [])


def test_a_command_that_is_interrupted_ends_with_130():
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    name, command = "version", main.get_command(None, "version")
    before, command.callback = command.callback, interrupt
    try:
        done = CliRunner().invoke(main, [name])
    finally:
        command.callback = before
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
