"""Jobs that only run forward: outputs equal the unsplit model's in eval mode, and what belongs to training is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stagekit.examples import embed

SEED, CHUNKS = 5, 4
SIZES = {"layers": 4, "width": 16, "heads": 2, "sequence": 16}
PROGRAMS = Path(__file__).parent / "programs"


def job(name, output, *, batch, windows, **pipeline):
    return {
        "version": 1,
        "name": name,
        "program": "stagekit.examples.embed:Program",
        "params": {**SIZES, "output": str(output), "batch": batch, "num_windows": windows},
        "pipeline": {"schedule": "forward", "stages": 4, "chunks": CHUNKS, **pipeline},
        "train": {"steps": 10_000, "seed": SEED},
    }


def unsplit(output, *, batch, windows, replica=0, replicas=1):
    """What the model alone gives for the same batches, chunk by chunk."""
    program = embed.Program(**SIZES, output=str(output), batch=batch, num_windows=windows)
    program.chunks = CHUNKS
    torch.manual_seed(SEED)
    model = program.build_model().eval()
    with torch.no_grad():
        return torch.cat(
            [
                model(part)
                for each in program.batches(0, replica, replicas)
                for part in each.args[0].tensor_split(CHUNKS)
            ]
        )


def vectors(file):
    return torch.from_numpy(np.fromfile(file, "float32").reshape(-1, SIZES["width"]))


def test_a_forward_job_gives_the_outputs_of_the_unsplit_model_bit_for_bit_until_its_data_ends(cluster, tmp_path):
    sizes = {"batch": 10, "windows": 237}  # a remainder in every batch, and a last batch of 7
    ended = cluster.run(job("embed", tmp_path / "vectors", **sizes))
    got = vectors(tmp_path / "vectors.0.f32")
    assert len(got) == 237
    assert torch.equal(got, unsplit(tmp_path / "vectors", **sizes))
    assert (ended.plan.schedule, ended.plan.bit_equal) == ("forward", "yes")
    assert ended.progress.step == 24
    records = cluster.records(ended.job_id, "STEPS")
    assert [record["rows"] for record in records] == [10] * 23 + [7]
    assert "loss" not in records[0]
    assert "step 24" in cluster.pipectl("get", "jobs", "embed").stdout.replace("24/10000", "step 24")
    assert "loss" not in cluster.pipectl("wait", "embed").stdout


def test_replicas_whose_batches_end_at_different_times_all_finish(cluster, tmp_path):
    sizes = {"batch": 8, "windows": 45}  # 23 windows in 5 batches of one replica, 22 in 5 of the other
    cluster.run(job("embed-twice", tmp_path / "vectors", **sizes, stages=2, replicas=2))
    for replica in range(2):
        assert torch.equal(
            vectors(tmp_path / f"vectors.{replica}.f32"), unsplit(tmp_path, **sizes, replica=replica, replicas=2)
        )


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"pipeline": {"schedule": "1f1b"}}, "pipeline.schedule", "only runs forward"),
        ({"pipeline": {"recompute": True}}, "job", "pipeline.recompute is for training"),
        ({"train": {"steps": 1, "clip_grad_norm": 1.0}}, "job", "train.clip_grad_norm is for training"),
        ({"checkpoint": {"dir": "/data"}}, "job", "checkpoint is for training"),
        (
            {"program": "stagekit.examples.gpt:Program", "params": {}},
            "pipeline.schedule",
            "has no backward, but Program",
        ),
    ],
)
def test_what_contradicts_a_forward_job_is_told_before_anything_starts(cluster, tmp_path, changes, field, told):
    spec = job("contradicts", tmp_path / "vectors", batch=8, windows=40)
    spec |= {key: {**spec[key], **value} if key in ("pipeline", "train") else value for key, value in changes.items()}
    done = cluster.pipectl("submit", cluster.write(spec))
    assert done.returncode == 2
    assert told in done.stderr
    assert field == "job" or field in done.stderr
    assert cluster.pipectl("get", "jobs", "contradicts").returncode != 0
