"""Sizes that export never looks at, orders that Python does not care about, and dropout that was compiled."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stagekit
from stagekit.errors import ShapeError, StagekitError, UserError
from stagekit.graph.capture.capture import capture
from stagekit.run.local import LocalRun
from stagekit.testing import InProcessTransport, Mailbox, run_local


def mean_square(output, target):
    return ((output - target) ** 2).mean()


class CentresRows(nn.Module):
    """Another function of one row than of several."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] > 1:
            x = x - x.mean(0)
        return self.second(torch.tanh(self.first(x)))


def test_a_model_that_treats_one_row_otherwise_refuses_chunks_of_one_row():
    pipe = stagekit.pipeline(CentresRows, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    run_local(pipe, torch.randn(8, 4), target=torch.randn(8, 4))
    with pytest.raises(ShapeError, match=r"chunk of 1, and the model was captured for 2\.\."):
        run_local(pipe, torch.randn(5, 4), target=torch.randn(5, 4))


def test_batchnorm_refuses_one_row_as_the_plain_module_does():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    with pytest.raises(ShapeError, match="captured for 2"):
        run_local(pipe, torch.randn(5, 4), target=torch.randn(5, 4))


def test_an_ordinary_model_takes_chunks_of_one_row():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(4, 4),), loss_fn=mean_square, stages=2, chunks=4)
    x, target = torch.randn(5, 4), torch.randn(5, 4)
    torch.manual_seed(0)
    expected = mean_square(build()(x), target).item()
    assert run_local(pipe, x, target=target).loss == pytest.approx(expected, rel=1e-6)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *, x, options):
        return self.second(self.first(x) * options["scale"] + options["shift"])


def test_keywords_and_dicts_may_come_in_any_order():
    x, scale, shift = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)
    example = {"x": x, "options": {"scale": scale, "shift": shift}}
    pipe = stagekit.pipeline(Masked, kwargs=example, loss_fn=mean_square, stages=2, chunks=2)
    target = torch.randn(2, 4)
    one = run_local(pipe, target=target, x=x, options={"scale": scale, "shift": shift})
    other = run_local(pipe, target=target, options={"shift": shift, "scale": scale}, x=x)
    assert one.loss == other.loss
    with pytest.raises(ShapeError, match="pass the same structure"):
        run_local(pipe, target=target, x=x, options={"scale": scale})


@pytest.mark.parametrize("seed", range(4))
def test_compiled_dropout_takes_every_seed_and_is_independent_of_the_cut(seed):
    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    x, target = torch.randn(8, 4), torch.randn(8, 4)
    losses = [
        run_local(
            stagekit.pipeline(
                build, args=(x[:2],), loss_fn=mean_square, stages=stages, chunks=4, compile="aot_eager", seed=seed
            ),
            x,
            target=target,
        ).loss
        for stages in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        return {"y": y, "mean": y.mean(0), "loss": (y**2).mean()}


def two_outputs(**more):
    return stagekit.pipeline(
        TwoOutputs, args=(torch.randn(4, 4),), loss_fn=lambda output, target: output["loss"], stages=2, chunks=2, **more
    )


def test_an_output_without_a_batch_is_refused_by_name_unless_the_caller_says_how_to_merge_it():
    with pytest.raises(UserError, match=r"output leaf 1, torch.float32 \(4,\), has no batch dimension"):
        run_local(two_outputs(), torch.randn(8, 4), target=torch.zeros(8))
    rules = {"y": None, "mean": stagekit.Mean(), "loss": None}
    result = run_local(two_outputs(output_spec=rules), torch.randn(8, 4), target=torch.zeros(8))
    torch.testing.assert_close(result.output["mean"], result.output["y"].mean(0))


def test_a_loss_that_the_model_computes_needs_no_target_and_is_weighted_by_rows():
    torch.manual_seed(0)
    model = TwoOutputs()
    x = torch.randn(5, 4)
    rules = {"y": None, "mean": stagekit.Stack(), "loss": None}
    result = run_local(two_outputs(output_spec=rules), x, target=None)
    assert result.loss == pytest.approx(model(x)["loss"].item(), rel=1e-6)


def test_a_target_of_another_number_of_rows_is_refused_instead_of_broadcast():
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(2, 4),), loss_fn=mean_square, stages=2, chunks=4)
    with pytest.raises(StagekitError, match=r"has shape \(6, 4\), but the batch has 4 rows"):
        run_local(pipe, torch.randn(4, 4), target=torch.randn(6, 4))


def test_a_failed_step_leaves_the_gradients_as_they_were():
    fails = {"at": None, "calls": 0}

    def loss(output, target):
        fails["calls"] += 1
        if fails["calls"] == fails["at"]:
            raise ValueError("no")
        return mean_square(output, target)

    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    pipe = stagekit.pipeline(build, args=(torch.randn(2, 4),), loss_fn=loss, stages=2, chunks=4)
    run = LocalRun(pipe.source, pipe.plan, pipe.options, in_process())
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    run.step((x,), {}, target)
    once = {name: gradient.clone() for name, gradient in run.gradients().items()}
    fails["at"] = fails["calls"] + 3
    with pytest.raises(StagekitError, match="ValueError: no"):
        run.step((x,), {}, target)
    assert all(torch.equal(once[name], gradient) for name, gradient in run.gradients().items())
    run.step((x,), {}, target)
    for name, gradient in run.gradients().items():
        torch.testing.assert_close(gradient, 2 * once[name])


def in_process():
    mailbox = Mailbox()
    return lambda rank: InProcessTransport(rank, mailbox)


def test_recomputed_stages_with_batchnorm_train_as_the_plain_module():
    def build():
        return nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        )

    x, target = torch.randn(8, 4), torch.randn(8, 4)
    results = [
        run_local(
            stagekit.pipeline(
                build, args=(x[:4],), loss_fn=mean_square, stages=3, chunks=2, recompute=recompute, schedule="gpipe"
            ),
            x,
            target=target,
        )
        for recompute in (False, True)
    ]
    assert results[0].loss == results[1].loss
    assert all(torch.equal(results[0].grads[name], results[1].grads[name]) for name in results[0].grads)
    assert all(torch.equal(results[0].buffers[name], results[1].buffers[name]) for name in results[0].buffers)


def test_the_plan_says_when_a_job_is_not_bit_equal_and_why(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    common = {"args": (torch.randn(4, 4),), "loss_fn": mean_square, "stages": 2, "chunks": 2}
    assert "draws random numbers" in stagekit.pipeline(build, **common).plan.bit_equal
    plain = stagekit.pipeline(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **common, replicas=2)
    assert plain.plan.bit_equal == "no (gradients are summed over 2 replicas)"
    rows = ("0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0")
    (tmp_path / "reversed.csv").write_text("\n".join(rows) + "\n")
    backwards = stagekit.pipeline(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **common, schedule=tmp_path / "reversed.csv"
    )
    assert backwards.plan.bit_equal == "no (0B0 adds to the gradients after a later chunk)"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, target: mean_square(output.detach(), target), "does not depend on anything that trains"),
        (lambda output, target: output.argmax(), "int64 tensor; a loss to train with"),
        (lambda output, target: output.sum() * 1j, "complex64 tensor; a loss to train with"),
    ],
)
def test_a_loss_that_nothing_can_be_learned_from_is_refused(loss, words):
    pipe = stagekit.pipeline(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(4, 4),), loss_fn=loss, stages=2, chunks=2
    )
    with pytest.raises(StagekitError, match=words):
        run_local(pipe, torch.randn(8, 4), target=torch.randn(8, 4))


class Computes(nn.Module):
    """Makes a number of the batch's size with the function that a test gives."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(6, 6), nn.Linear(6, 6), middle

    def forward(self, x: Tensor, **extra: Any) -> Tensor:
        return self.second(self.middle(self.first(x), **extra))  # type: ignore[no-any-return]


def by_root(h: Tensor) -> Tensor:
    return h / math.sqrt(h.shape[0])


def by_float(h: Tensor) -> Tensor:
    return h * float(h.shape[0])


def by_linspace(h: Tensor) -> Tensor:
    return h * torch.linspace(0, 1, h.shape[0])[:, None]


def by_type(h: Tensor) -> Tensor:
    if type(h.shape[0]) is not int:
        raise TypeError("rows are no int")
    return h * h.shape[0]


@pytest.mark.parametrize("middle", [by_root, by_float, by_linspace, by_type])
def test_a_size_that_becomes_a_number_is_told_with_the_line_when_a_step_brings_another(middle: Any) -> None:
    pipe = stagekit.pipeline(Computes(middle), args=(torch.randn(4, 6),), loss_fn=mean_square, stages=2, chunks=2)
    (fixed,) = pipe.plan.model.fixed
    assert (fixed.graph_input, fixed.dim) == (0, 0)
    with pytest.raises(
        ShapeError, match=rf'captured with 4 \(forward .*at "{__file__}", line \d+, in {middle.__name__}'
    ):
        run_local(pipe, torch.randn(12, 6), target=torch.randn(12, 6))


def number_of_a_keyword(h: Tensor, given: dict[str, Tensor]) -> Tensor:
    return h + math.sqrt(given["of"].shape[0])


def test_the_size_of_a_nested_keyword_is_told_too() -> None:
    captured = capture(Computes(number_of_a_keyword), (torch.randn(4, 6),), {"given": {"of": torch.zeros(3).long()}})
    (fixed,) = captured.fixed
    assert captured.inputs[fixed.graph_input].name == "kwargs['given']['of']"
    assert "number_of_a_keyword" in fixed.reason
