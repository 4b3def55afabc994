"""Jobs that leave a choice: every rank runs what rank 0 chose, and `pipectl plan` says beside what, and why."""

import json

import pytest
import torch
import yaml
from click.testing import CliRunner

from pipectl.__main__ import main
from stagekit.examples import gpt
from stagekit.run import checkpoint
from tests.support import reference

PARAMS = {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 8}


def job(pipeline, **more):
    return {
        "version": 1, "name": "gpt-auto", "program": "stagekit.examples.gpt:Program", "params": PARAMS,
        "pipeline": pipeline, "train": {"steps": 3, "seed": 11}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("chunks", [4, "auto"])
def test_a_job_whose_schedule_is_chosen_equals_the_plain_loop_bit_for_bit(cluster, tmp_path, chunks):
    folder = tmp_path / "weights"
    spec = job({"stages": 2, "schedule": "auto", "chunks": chunks}, checkpoint={"dir": str(folder)})
    ended = cluster.run(spec)
    assert ended.plan.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", "eager-1f1b")
    assert ended.plan.num_chunks == 4 if chunks == 4 else ended.plan.num_chunks in (2, 4, 8)
    losses, weights = reference.train(gpt.Program(**PARAMS), steps=3, chunks=ended.plan.num_chunks, seed=11)
    assert cluster.losses(ended.job_id) == losses
    (only,) = [path for path in folder.iterdir() if path.name.startswith("step_")]
    state = checkpoint.load(only)
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []


def plan(folder, pipeline, *flags):
    """Run `pipectl plan` in its own process for the measuring; return (exit code, output)."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job(pipeline), sort_keys=False))
    done = CliRunner().invoke(main, ["plan", *flags, str(folder / "job.yaml")])
    return done.exit_code, done.output


def test_the_plan_shows_the_winner_first_then_runners_up_the_bound_and_where_the_time_goes(tmp_path):
    status, text = plan(tmp_path, {"stages": 2, "schedule": "auto", "chunks": "auto"})
    assert status == 0, text
    head, *rows = text[text.index("   SCHEDULE") :].splitlines()[:6]
    assert head.split() == [
        "SCHEDULE",
        "STAGES/RANK",
        "CHUNKS",
        "STEP",
        "ms",
        "BUBBLE",
        "MEMORY/RANK",
        "ABOVE",
        "BOUND",
    ]
    assert rows[0].startswith("→") and not any(row.startswith("→") for row in rows[1:])
    assert "no plan on these ranks can take less than" in text and "filling and draining" in text
    assert "memory per rank: " in text


def test_json_has_all_that_was_compared_and_the_plan_that_was_given_is_its_first(tmp_path):
    status, text = plan(tmp_path, {"stages": 2, "schedule": "gpipe", "chunks": 4}, "-o", "json")
    document = json.loads(text)
    first, *others = document["ranking"]["plans"]
    assert status == 0 and (first["schedule"], first["chunks"]) == ("gpipe", 4) == (
        document["schedule"],
        document["num_chunks"],
    )
    assert {each["schedule"] for each in others} >= {"1f1b", "zb-h1"}
    assert all(each["step_s"] >= document["ranking"]["bound_s"] for each in (first, *others))
    assert len(first["rank_bytes"]) == 2 and set(document["ranking"]["limited_by"]) == {
        "work_s", "uneven_s", "transfers_s", "fill_and_drain_s",
    }  # fmt: skip


def test_where_no_plan_fits_the_memory_the_least_that_is_needed_is_told(tmp_path):
    status, text = plan(tmp_path, {"stages": 2, "schedule": "auto", "balance": {"memory": "100KiB"}})
    assert status == 2 and "pipeline.balance.memory: no plan fits the memory cap of 100 KiB on each of 2 ranks" in text
    assert "the most modest needs" in text and "job.yaml:" in text
