"""`run.eval`: the model in eval mode on the tensors that train, between two steps and without a trace in them."""

import math

import pytest
import torch
from torch import nn

import stagekit
from stagekit.testing import spawn

ROWS, CHUNKS = 10, 4
CASES = [("1f1b", 1), ("zb-v", 2)]


class Classifier(nn.Module):
    """BatchNorm and dropout; in eval mode other outputs, and a head that only training has."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4)) for _ in range(4)
        )
        self.auxiliary, self.head = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        if self.training:
            return {"logits": self.head(h), "auxiliary": self.auxiliary(h)}
        return self.head(h)


def loss_of(output, target):
    logits = output["logits"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits, target)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def train_and_evaluate(rank, schedule, stages_per_rank):
    pipe = stagekit.pipeline(
        Classifier, (batch(1)[0][:3],), loss_fn=loss_of, stages=2 * stages_per_rank, stages_per_rank=stages_per_rank,
        chunks=CHUNKS, schedule=schedule, seed=3,
    )  # fmt: skip
    run = pipe.deploy()
    optimizer = torch.optim.SGD(run.parameters(), 0.05)
    found = {"with": [], "without": []}
    for step in range(2):
        x, target = batch(step)
        run.zero_grad()
        run.step(x, target=target)
        gradients = {name: p.grad.clone() for name, p in run.named_parameters() if p.grad is not None}
        random_state = torch.get_rng_state()
        x, target = batch(7)
        scored = run.eval(x, target=target) if rank == 0 else run.eval()
        found["with"].append((scored.loss, scored.output, [float(loss) for loss in scored.losses]))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(torch.equal(p.grad, gradients[n]) for n, p in run.named_parameters() if p.grad is not None)
        found["state"] = {name: value.clone() for name, value in run.state_dict().items()}
        optimizer.step()
    found["graph"] = scored.output is not None and scored.output.requires_grad
    return found


def everything(rank):
    """What two ranks show, in one pair of processes."""
    trained = {case: train_and_evaluate(rank, *case) for case in CASES}
    return {
        **trained,
        "without targets": score_without_targets(rank),
        "empty stages": score_with_empty_stages(rank),
    }


@pytest.fixture(scope="module")
def both():
    return spawn(everything, 2, timeout_s=120.0)


def score_without_targets(rank):
    pipe = stagekit.pipeline(
        Classifier, (batch(1)[0][:3],), loss_fn=loss_of, stages=2, chunks=CHUNKS, schedule="1f1b", seed=3
    )
    run = pipe.deploy()
    scored = [run.eval(batch(seed)[0][:rows]) for seed, rows in ((1, ROWS), (2, 7))]
    return [(result.loss, result.output) for result in scored], run.state_dict()


@pytest.mark.parametrize(("schedule", "stages_per_rank"), CASES)
def test_evaluation_between_steps_scores_as_the_model_in_eval_mode(both, schedule, stages_per_rank):
    ranks = [found[schedule, stages_per_rank] for found in both]
    last = 1 if stages_per_rank == 1 else 0  # V-shaped: the last stage lies on the first rank
    model = Classifier().eval()
    x, target = batch(7)
    model.load_state_dict(ranks[0]["state"] | ranks[1]["state"])
    first, second = (rank["with"] for rank in (ranks[last], ranks[1 - last]))
    assert all(output is None for _, output, _ in second)
    assert [loss for loss, _, _ in first] == [loss for loss, _, _ in second]
    assert first[0][0] != first[1][0]  # the weights moved
    assert not ranks[last]["graph"]
    sizes = [3, 3, 2, 2]
    weighted = sum(loss * size for loss, size in zip(first[1][2], sizes, strict=True)) / ROWS
    assert first[1][0] == pytest.approx(weighted)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(first[1][1], expected)
    assert first[1][0] == pytest.approx(float(loss_of(expected, target)), rel=1e-5)


def test_a_batch_is_scored_without_a_target_and_in_other_sizes(both):
    (_, first_state), (scored, state) = (found["without targets"] for found in both)
    model = Classifier().eval()
    model.load_state_dict(first_state | state)
    for (loss, output), (seed, rows) in zip(scored, ((1, ROWS), (2, 7)), strict=True):
        assert math.isnan(loss)
        with torch.no_grad():
            torch.testing.assert_close(output, model(batch(seed)[0][:rows]))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return x


def layers():
    return nn.Sequential(Counter(), nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 3), Counter())


def score_with_empty_stages(rank):
    found = []
    for split, schedule, stages_per_rank in ((["4"], "1f1b", 1), (["1", "2", "3"], "zb-v", 2)):
        pipe = stagekit.pipeline(
            layers, (batch(1)[0][:3],), loss_fn=loss_of, stages=len(split) + 1, stages_per_rank=stages_per_rank,
            split=split, chunks=CHUNKS, schedule=schedule, seed=3,
        )  # fmt: skip
        run = pipe.deploy()
        run.step(batch(1)[0], target=batch(1)[1])
        scored = run.eval(batch(7)[0], target=batch(7)[1])
        found.append((float(scored.loss), scored.output, run.state_dict()))
    return found


def test_stages_that_do_nothing_in_eval_mode_are_passed(both):
    for (loss, output, state), (other_loss, other_output, other_state) in zip(
        *(found["empty stages"] for found in both), strict=True
    ):
        model, (x, target) = layers(), batch(7)
        model.load_state_dict(state | other_state)
        with torch.no_grad():
            expected = model.eval()(x)
        torch.testing.assert_close(output if output is not None else other_output, expected)
        assert loss == other_loss == pytest.approx(float(loss_of(expected, target)), rel=1e-5)
