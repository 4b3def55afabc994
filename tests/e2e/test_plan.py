"""`pipectl plan` in a process of its own: what the job file says of memory and speeds reaches the cut."""

import pytest
import yaml
from click.testing import CliRunner

from pipectl.__main__ import main


def plan(folder, balance, command="plan", *flags):
    """Run pipectl on a small GPT in 2 stages; return (exit code, output)."""
    spec = {
        "version": 1,
        "name": "gpt",
        "program": "stagekit.examples.gpt:Program",
        "params": {"width": 64, "layers": 4},
        "pipeline": {"stages": 2, "chunks": 4, "balance": balance},
        "train": {"steps": 1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    done = CliRunner().invoke(main, [command, *flags, str(folder / "job.yaml")])
    return done.exit_code, done.output


def test_a_memory_cap_and_speeds_of_the_job_file_shape_the_plan(tmp_path):
    status, text = plan(tmp_path, {"memory": "1GiB", "speeds": [4, 1], "block_boundaries": True})
    assert status == 0, text
    assert "at blocks, speeds 4, 1, largest stage" in text and "MiB of 1 GiB" in text
    begins = [line.split()[1] for line in text.splitlines() if line.startswith("1 ")]
    assert begins and begins[0].startswith("blocks.") and int(begins[0].split(".")[1]) >= 2, text


@pytest.mark.parametrize(("command", "flags"), [("plan", ()), ("validate", ("--deep",))])
def test_a_memory_cap_that_no_cut_fits_is_refused_with_what_is_needed(tmp_path, command, flags):
    status, text = plan(tmp_path, {"memory": "300KiB"}, command, *flags)
    assert status == 2, text
    assert "pipeline.balance.memory: no cut into 2 stages fits the memory cap: the best one needs " in text
    assert "MiB in stage 1 with 1 chunks in flight, the cap is 300 KiB; use more stages" in text
    assert "job.yaml:11:13)" in text, "the place of the value"
