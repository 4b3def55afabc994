"""A capture in eval mode is cut so that its stages run on the tensors of the stages that train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import Chain
from torch import Tensor, nn

from stagekit.errors import SplitError
from stagekit.graph.capture.capture import capture
from stagekit.graph.cut.cut import Cut


class Classifier(nn.Module):
    """BatchNorm and dropout; an auxiliary head that only training uses; other outputs in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4)) for _ in range(4)
        )
        self.auxiliary = nn.Linear(8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        if self.training:
            return {"logits": self.head(h), "auxiliary": self.auxiliary(h)}
        return self.head(h).softmax(-1)


def x_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def shared(cut: Cut, trained: Chain) -> Chain:
    """Return the stages of `cut` on the tensors of `trained`."""
    chain = Chain(cut)
    chain.modules = [cut.stage_module(i, tensors=module) for i, module in enumerate(trained.modules)]
    return chain


@pytest.mark.parametrize("stages", [2, 4])
def test_eval_stages_compute_what_the_trained_model_computes_in_eval_mode(stages: int) -> None:
    train = capture(Classifier, (x_of(8),), training=True).cut("balanced", stages)
    evaluation = capture(Classifier, (x_of(8),), training=False).cut_like(train)
    chain = Chain(train)
    scorer = shared(evaluation, chain)
    optimizers = [torch.optim.SGD(module.parameters(), 0.001) for module in chain.modules]
    for step in range(3):
        output = chain.forward((x_of(8, step),), seed_base=step)
        chain.backward((output["logits"] ** 2).sum() + output["auxiliary"].sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    module = Classifier()
    module.load_state_dict(chain.state_dict())
    module.eval()
    before = copy.deepcopy(chain.state_dict())
    for rows in (8, 5):
        torch.testing.assert_close(scorer.forward((x_of(rows, 9),)), module(x_of(rows, 9)))
    assert all(torch.equal(value, before[name]) for name, value in chain.state_dict().items())


def test_each_eval_stage_reads_only_what_its_training_stage_owns() -> None:
    train = capture(Classifier, (x_of(8),), training=True).cut(["blocks.1", "blocks.3"], 3)
    evaluation = capture(Classifier, (x_of(8),), training=False).cut_like(train)
    for ours, theirs in zip(evaluation.graphs, train.spec.stages, strict=True):
        owned = {*(parameter.name for parameter in theirs.parameters), *theirs.buffers}
        assert {state.name for state in ours.states} <= owned


def test_the_mode_is_as_asked_and_the_module_keeps_its_own() -> None:
    module = Classifier()
    module.blocks[1].eval()
    modes = [child.training for child in module.modules()]
    by_flag = {flag: capture(module, (x_of(8),), training=flag) for flag in (None, True, False)}
    assert [child.training for child in module.modules()] == modes
    norms = {
        flag: [node.args[5] for node in captured.graph.nodes if "batch_norm" in str(node.target)]
        for flag, captured in by_flag.items()
    }
    assert norms == {None: [True, False, True, True], True: [True] * 4, False: [False] * 4}
    assert all(captured.self_check == "values" for captured in by_flag.values())


def test_a_model_in_eval_mode_that_runs_its_layers_in_another_order_is_refused_by_name() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            order = (self.first, self.second) if self.training else (self.second, self.first)
            for layer in order:
                x = torch.tanh(layer(x))
            return x

    train = capture(Turned, (x_of(4),), training=True).cut("balanced", 2)
    with pytest.raises(SplitError, match=r"reads first\.\w+ \(stage 0 .*\) after second\.\w+ \(stage 1\)"):
        capture(Turned, (x_of(4),), training=False).cut_like(train)


class HeadOfEval(nn.Module):
    """Eval mode reads a layer that training never reads: registered last, or first."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        if first:
            self.head = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        if not first:
            self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.training else self.head(x)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_layer_that_only_eval_mode_reads_is_where_the_constructor_makes_it(stages: int) -> None:
    train = capture(HeadOfEval, (x_of(4),), training=True).cut("parameters", stages)
    chain = Chain(train)
    scorer = shared(capture(HeadOfEval, (x_of(4),), training=False).cut_like(train), chain)
    module = HeadOfEval()
    module.load_state_dict(chain.state_dict())
    torch.testing.assert_close(scorer.forward((x_of(4),)), module.eval()(x_of(4)))


def test_a_layer_that_only_eval_mode_reads_made_too_early_is_refused_with_where_to_make_it() -> None:
    train = capture(lambda: HeadOfEval(True), (x_of(4),), training=True).cut("parameters", 2)
    with pytest.raises(SplitError, match=r"training never reads head\.\w+, .* create it in __init__ after layers\.\d"):
        capture(lambda: HeadOfEval(True), (x_of(4),), training=False).cut_like(train)


class OnlyWhileTraining(nn.Module):
    """Whole stages of it do nothing in eval mode: the first, one in the middle and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.drop, self.second, self.after = (
            Counter(), nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6), Counter()
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return x


@pytest.mark.parametrize(
    "begins", [["first"], ["first", "drop", "second"], ["after"], ["first", "drop", "second", "after"]]
)
def test_a_stage_that_does_nothing_in_eval_mode_is_empty_there(begins: list[str]) -> None:
    train = capture(OnlyWhileTraining, (x_of(4),), training=True).cut(begins, len(begins) + 1)
    chain = Chain(train)
    chain.forward((x_of(4),))
    scorer = shared(capture(OnlyWhileTraining, (x_of(4),), training=False).cut_like(train), chain)
    module = OnlyWhileTraining()
    module.load_state_dict(chain.state_dict())
    torch.testing.assert_close(scorer.forward((x_of(4),)), module.eval()(x_of(4)))
    assert module.before.calls == module.after.calls == 1
