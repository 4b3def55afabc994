"""Forward only: a pipeline without a loss scores batches in eval mode, and keeps nothing for a backward."""

import math

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import UserError
from stagekit.plan.credits import SEND_CREDITS
from stagekit.testing import run_local, spawn

ROWS, CHUNKS = 10, 4


class Scorer(nn.Module):
    """Dropout and BatchNorm, so that eval mode matters; a dict of results, one of them nothing."""

    def __init__(self):
        super().__init__()
        self.enter, self.drop, self.norm = nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x):
        return {"scores": self.leave(torch.relu(self.norm(self.drop(self.enter(x))))), "nothing": None}


def model():
    torch.manual_seed(3)
    return Scorer()


def batch(rows=ROWS, seed=1):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def unsplit(x, chunks):
    scorer = model().eval()
    with torch.no_grad():
        return torch.cat([scorer(part)["scores"] for part in x.tensor_split(chunks)])


def pipeline(chunks=CHUNKS, **options):
    return stagekit.pipeline(model(), (batch()[:3],), stages=2, chunks=chunks, **{"loss_fn": None, **options})


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output["scores"], target)


def everything(rank):
    run = pipeline().deploy()
    given = [batch(), batch(7, seed=2)]
    found = {"steps": [run.step(x) if rank == 0 else run.step() for x in given], "eval": run.eval(given[0])}
    found = {name: pytree_of(results) for name, results in found.items()}
    found["gradients"] = [name for name, p in run.named_parameters() if p.grad is not None]
    found["held"] = sum(runner.peak_chunks for runner in run._runners.values())
    many = pipeline(chunks=40).deploy()
    found["many"] = many.step(batch(120, seed=3)).output
    found["buffers"] = many.executor.pool.num_buffers
    scored = pipeline(loss_fn=cross_entropy, schedule="forward").deploy()
    result = scored.step(batch(), target=torch.arange(ROWS) % 3)
    found["loss"] = result.loss
    try:
        pipeline().deploy().step(batch(), target=torch.arange(ROWS) % 3)
    except UserError as error:
        found["target"] = str(error)
    return found


def pytree_of(results):
    results = results if isinstance(results, list) else [results]
    return [(result.loss, result.output) for result in results]


@pytest.fixture(scope="module")
def ranks():
    return spawn(everything, 2)


def test_outputs_equal_the_unsplit_model_in_eval_mode_bit_for_bit_also_with_a_remainder_chunk(ranks):
    first, last = ranks
    assert [output for _, output in first["steps"]] == [None, None]
    for (loss, output), x in zip(last["steps"], (batch(), batch(7, seed=2)), strict=True):
        assert torch.equal(output["scores"], unsplit(x, CHUNKS))
        assert output["nothing"] is None
        assert math.isnan(loss)
        assert not output["scores"].requires_grad
    assert torch.equal(last["eval"][0][1]["scores"], unsplit(batch(), CHUNKS))


def test_nothing_is_kept_for_a_backward(ranks):
    for rank in ranks:
        assert rank["gradients"] == []
        assert rank["held"] == 0


def test_many_chunks_stream_through_a_bounded_window_of_buffers(ranks):
    assert torch.equal(ranks[1]["many"]["scores"], unsplit(batch(120, seed=3), 40))
    assert 0 < ranks[1]["buffers"] <= SEND_CREDITS + 1


def test_a_loss_function_scores_targets_on_every_rank(ranks):
    scorer = model().eval()
    with torch.no_grad():
        expected = float(cross_entropy(scorer(batch()), torch.arange(ROWS) % 3))
    assert ranks[0]["loss"] == ranks[1]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_target_without_a_loss_function_is_refused_on_every_rank(ranks):
    for rank in ranks:
        assert "a target was passed, but this pipeline has no loss_fn" in rank["target"]


def test_a_forward_pipeline_runs_in_one_process():
    result = run_local(pipeline(), batch())
    assert math.isnan(result.loss)
    assert torch.equal(result.output["scores"], unsplit(batch(), CHUNKS))
    assert set(result.grads.values()) == {None}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": "1f1b"}, "loss_fn is None, but schedule"),
        ({"recompute": True}, "schedule forward has no backward"),
        ({"loss_weight": float}, "loss_weight weighs the losses"),
    ],
)
def test_what_only_training_has_is_refused_before_anything_is_captured(options, told):
    with pytest.raises(UserError, match=told):
        pipeline(**options)
