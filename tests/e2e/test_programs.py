"""What a program may say beyond the required: a schedule of learning rates, an early end; and what it may not."""

import json
from pathlib import Path

import torch
import yaml

from stagekit.run import checkpoint
from tests.e2e.programs import broken

PROGRAMS = Path(__file__).parent / "programs"
SEED = 9


def job(name, program, **more):
    return {
        "version": 1,
        "name": name,
        "program": f"broken:{program}",
        "source": str(PROGRAMS),
        "pipeline": {"stages": 2, "chunks": 4},
        "train": {"steps": 100, "seed": SEED},
        **more,
    }


def plain_loop():
    program = broken.Plain()
    torch.manual_seed(SEED)
    model = program.build_model()
    optimizer = program.optimizer(model.named_parameters())
    scheduler = program.scheduler(optimizer)
    batches = program.batches(0, 0, 1)
    for _ in range(4):
        batch = next(batches)
        for x, target in zip(batch.args[0].chunk(4), batch.target.chunk(4), strict=True):
            program.loss(model(x), target).backward(torch.tensor(0.25))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def test_a_plain_class_trains_with_its_scheduler_until_it_says_stop(cluster, tmp_path):
    ended = cluster.run(job("plain", "Plain", checkpoint={"dir": str(tmp_path / "saved")}))
    assert len(cluster.losses(ended.job_id)) == 4
    (folder,) = [path for path in (tmp_path / "saved").iterdir() if path.name.startswith("step_")]
    assert folder.name.startswith("step_4.")
    state = checkpoint.load(folder)
    assert [name for name, value in plain_loop().items() if not torch.equal(value, state[name])] == []


def test_a_checkpoint_folder_that_can_not_be_written_ends_the_job_before_its_first_step(cluster, tmp_path):
    (tmp_path / "file").touch()
    job_id = cluster.submit(job("unwritable", "Fine", checkpoint={"dir": str(tmp_path / "file" / "below")}))
    assert cluster.pipectl("wait", job_id).returncode == 1
    text = cluster.describe(job_id)
    assert f"checkpoint.dir {tmp_path}/file/below can't be written on this node" in text
    assert cluster.api.get(job_id).progress.step == 0


def test_a_method_that_would_be_ignored_is_refused(cluster, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job("collects", "Collects")))
    done = cluster.pipectl("submit", str(path))
    assert done.returncode == 2
    assert 'Collects has collect(), which only programs of mode "forward" are asked for' in done.stderr


def test_a_program_scores_held_out_data_between_steps_and_trains_as_without(cluster, tmp_path):
    spec = job("evaluates", "Evaluates")
    spec["train"] = {**spec["train"], "steps": 6, "eval_every": 2}
    scored = cluster.run(spec)
    lines = [json.loads(line.partition("] ")[2]) for line in cluster.pipectl("logs", scored.job_id).stdout.splitlines()]
    found = [(line["step"], line["seen"], line["held_out"]) for line in lines if line.get("event") == "evaluated"]
    assert [(step, seen) for step, seen, _ in found] == [(2, 2), (4, 4), (6, 6)]
    assert found[0][2] > found[1][2] > found[2][2] > 0
    plain = job("unscored", "Fine")
    plain["train"] = {**plain["train"], "steps": 6}
    assert cluster.losses(scored.job_id) == cluster.losses(cluster.run(plain).job_id)


def test_an_evaluation_that_the_program_does_not_have_is_refused_before_anything_starts(cluster, tmp_path):
    spec = job("unscorable", "Fine")
    spec["train"] = {**spec["train"], "eval_every": 2}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    done = cluster.pipectl("submit", str(path))
    assert done.returncode == 2
    assert "train.eval_every is 2, but Fine has no evaluate(run, step)" in done.stderr
