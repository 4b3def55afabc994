"""Jobs that train otherwise than plainly: sharded weights, several batches per step, half precision."""

import json
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from stagekit.run import checkpoint
from tests.e2e.programs import broken
from tests.support import reference

PROGRAMS = Path(__file__).parent / "programs"
SEED, STEPS, CHUNKS = 9, 4, 4


def job(name, program, pipeline=None, checkpoint=None, **train):
    return {
        "version": 1,
        "name": name,
        "program": f"broken:{program}",
        "source": str(PROGRAMS),
        "pipeline": {"stages": 2, "chunks": CHUNKS, **(pipeline or {})},
        "train": {"steps": STEPS, "seed": SEED, **train},
        **({"checkpoint": {"dir": str(checkpoint)}} if checkpoint else {}),
    }


def saved(folder):
    """Return the weights of the only checkpoint."""
    (step,) = folder.glob("step_*")
    return checkpoint.load(step)


def lines(cluster, job_id, event):
    """Return what the workers logged under that name."""
    text = cluster.pipectl("logs", job_id).stdout
    found = (json.loads(line.partition("] ")[2]) for line in text.splitlines() if f'"{event}"' in line)
    return [line for line in found if line["event"] == event]


def test_sharded_stages_accumulate_batches_as_one_process_does_and_are_saved_whole(cluster, tmp_path):
    spec = job("sharded", "Sharded", {"replicas": 2}, tmp_path / "saved", accumulate=2, eval_every=2)
    ended = cluster.run(spec)
    losses, weights = reference.train(broken.Fine(), steps=STEPS, chunks=CHUNKS, seed=SEED, replicas=2, accumulate=2)
    assert cluster.losses(ended.job_id) == pytest.approx(losses, rel=1e-6)
    state = saved(tmp_path / "saved")
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)
    model = broken.Fine().build_model()
    model.load_state_dict(state, strict=True)
    digests = {}
    for line in lines(cluster, ended.job_id, "weights_digest"):
        digests.setdefault(tuple(line["stages"]), []).append(line["digest"])
    assert [len(each) for each in digests.values()] == [2, 2]
    assert all(len(set(each)) == 1 for each in digests.values())
    for name in (
        "piped_grad_sync_seconds",
        "piped_grad_sync_exposed_seconds",
    ):  # once per batch: shards have no room for what waits
        assert counted(cluster, ended.job_id, name) == {("0", None): 4 * STEPS, ("1", None): 4 * STEPS}


def counted(cluster, job_id, name):
    """Return how often a duration of each stage was observed, by stage and phase, over all nodes, where it was."""
    found = Counter()
    for node in cluster.nodes:
        with urllib.request.urlopen(f"http://{node.endpoints['metrics']}/metrics", timeout=10) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{name}_count" and sample.labels["job_id"] == job_id and sample.value:
                    found[sample.labels["stage"], sample.labels.get("phase")] += sample.value
    return found


def in_fp16():
    """Train the unsplit model in this process as torch's documentation says; return losses, scales and weights."""
    program = broken.Overflows()
    torch.manual_seed(SEED)
    model = program.build_model()
    optimizer = program.optimizer(model.named_parameters())
    scheduler, scaler = program.scheduler(optimizer), torch.amp.GradScaler("cpu")
    batches, losses, scales = program.batches(0, 0, 1), [], []
    for _ in range(STEPS):
        total = 0.0
        for batch in (next(batches), next(batches)):
            for x, target in zip(batch.args[0].chunk(CHUNKS), batch.target.chunk(CHUNKS), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = program.loss(model(x), target)
                scaler.scale(loss / CHUNKS / 2).backward()
                total += float(loss.detach()) / CHUNKS / 2
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() == scale:
            scheduler.step()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales, model.state_dict()


def test_fp16_equals_autocast_and_a_scaler_in_one_process_also_where_a_step_overflows(cluster, tmp_path):
    spec = job(
        "fp16", "Overflows", {"schedule": "zb-h1"}, tmp_path / "saved", accumulate=2, precision="fp16", log_every=1
    )
    ended = cluster.run(spec)
    losses, scales, weights = in_fp16()
    assert scales == [65536.0, 32768.0, 32768.0, 32768.0]
    assert [line["loss_scale"] for line in lines(cluster, ended.job_id, "step")] == scales
    assert {line["step"] for line in lines(cluster, ended.job_id, "step_skipped")} == {2}
    assert cluster.losses(ended.job_id) == pytest.approx(losses, rel=1e-6)
    state = saved(tmp_path / "saved")
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    chunks = STEPS * 2 * CHUNKS
    phases = ("forward", "backward_input", "backward_weight")
    expected = {(stage, phase): chunks for stage in "01" for phase in phases}
    assert counted(cluster, ended.job_id, "piped_chunk_duration_seconds") == expected
