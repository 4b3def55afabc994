"""Sizes that change between chunks: another size of the same model works, one that is another model is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import stagekit
from stagekit.errors import CaptureError, ShapeError, StageError
from stagekit.graph.capture.capture import capture
from stagekit.testing import run_local


class Branches(nn.Module):
    """What it computes depends on whether the sequence has an even length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.embed(tokens)))
        if tokens.shape[1] % 2 == 0:
            h = h * 2
        return self.second(h)


def pipe_of(build: Any, length: int) -> Any:
    return stagekit.pipeline(
        build,
        args=(torch.zeros(2, length, dtype=torch.int64),),
        loss_fn=lambda output, target: output.square().mean(),
        stages=2,
        chunks=2,
    )


def test_a_length_for_which_the_model_branches_otherwise_is_refused_with_the_condition() -> None:
    pipe = pipe_of(Branches, 6)
    tokens = torch.randint(9, (4, 8))
    torch.manual_seed(0)
    expected = torch.stack([Branches()(part).square().mean() for part in [tokens]]).mean().item()
    assert run_local(pipe, tokens, target=torch.zeros(4)).loss == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match=r"captured where .*% 2.*; here s1 = 7 is dimension 1 of args\[0\]"):
        run_local(pipe, torch.randint(9, (4, 7)), target=torch.zeros(4))


def test_conditions_of_torchs_own_shape_functions_refuse_nothing() -> None:
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x).reshape(x.shape[0], 2, -1).transpose(1, 2).flatten(1)
            return self.layer(h.view(-1, 4))

    captured = capture(Reshapes, (torch.randn(4, 4),))
    assert captured.guards == ()
    assert [(s.name, s.minimum) for s in captured.symbols.symbols] == [("s0", 1)]


class Counts(nn.Module):
    """Two inputs of one batch and one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(tokens))
        return nn.functional.cross_entropy(logits.view(-1, 9), labels.view(-1))


def test_all_inputs_of_a_batch_may_shrink_to_one_row_and_one_token_together() -> None:
    tokens = torch.randint(9, (4, 6))
    captured = capture(Counts, (tokens, tokens.clone()))
    assert {s.minimum for s in captured.symbols.symbols} == {1}


class Recurrent(nn.Module):
    """A GRU and an interpolation, whose kernels ask for plain sizes unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.gru(x)
        return nn.functional.interpolate(h.transpose(1, 2), size=9, mode="linear")


def test_recurrent_and_resizing_kernels_keep_the_batch_symbolic() -> None:
    captured = capture(Recurrent, (torch.randn(3, 5, 4),))
    assert [(s.is_batch, s.example) for s in captured.symbols.symbols] == [(True, 3)]


class LimitedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.positions.weight[: tokens.shape[1]]
        return self.head(self.tokens(tokens) + table)


def test_a_sequence_beyond_the_position_table_is_refused_before_it_runs() -> None:
    pipe = pipe_of(LimitedPositions, 6)
    run_local(pipe, torch.randint(9, (4, 8)), target=torch.zeros(4))
    with pytest.raises(ShapeError, match=r"args\[0\] has size 9 in dimension 1; the model was captured for 1\.\.8"):
        run_local(pipe, torch.randint(9, (4, 9)), target=torch.zeros(4))


class FlattensBatch(nn.Module):
    """Folds batch and sequence into one dimension and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        h = torch.tanh(self.layer(self.embed(tokens.reshape(-1))))
        return self.layer(h.view(rows, length, 4)).sum(1)


def test_a_batch_folded_into_the_sequence_stays_exact_for_other_sizes() -> None:
    pipe = pipe_of(FlattensBatch, 6)
    torch.manual_seed(0)
    model = FlattensBatch()
    for rows, length in ((2, 1), (6, 9)):
        tokens = torch.randint(9, (rows, length))
        expected = model(tokens).square().mean().item()
        assert run_local(pipe, tokens, target=torch.zeros(rows)).loss == pytest.approx(expected, rel=1e-5)


class Positions(nn.Module):
    """Looks positions up in a table, shifted by two as OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(12, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0) + 2
        return self.head(self.tokens(tokens) + self.positions(positions))


def test_a_sequence_beyond_looked_up_positions_is_refused_before_it_runs() -> None:
    pipe = pipe_of(Positions, 6)
    run_local(pipe, torch.randint(9, (4, 10)), target=torch.zeros(4))
    with pytest.raises(ShapeError, match=r"has size 11 in dimension 1; the model was captured for 1\.\.10"):
        run_local(pipe, torch.randint(9, (4, 11)), target=torch.zeros(4))


def test_a_failing_stage_names_the_users_line() -> None:
    pipe = stagekit.pipeline(
        Positions,
        args=(torch.zeros(2, 6, dtype=torch.int64),),
        loss_fn=lambda output, target: output.square().mean(),
        stages=2,
        chunks=2,
        split=["head"],
    )
    with pytest.raises(
        StageError, match=rf'stage 0, .*IndexError.*in embedding.* at "{__file__}", line \d+, in forward'
    ):
        run_local(pipe, torch.full((4, 6), 99), target=torch.zeros(4))


class Selected(nn.Module):
    """Makes more positions than it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = nn.Embedding(12, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1] + 8)[: x.shape[1]]
        return self.head(x + self.positions(positions))


def test_positions_that_are_made_but_not_looked_up_limit_nothing() -> None:
    x = torch.randn(3, 10, 4)
    captured = capture(Selected, (x,))
    assert [symbol.maximum for symbol in captured.symbols.symbols] == [None, None]


class Computes(nn.Module):
    """Three layers and a function of them and the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def loss_of(function: Any, example: Tensor, x: Tensor) -> tuple[float, float]:
    """Return the loss in two stages over two chunks, captured from `example`, and that of the plain module."""
    pipe = stagekit.pipeline(
        lambda: Computes(function),
        args=(example,),
        loss_fn=lambda output, target: output.square().mean(),
        stages=2,
        chunks=2,
    )
    torch.manual_seed(0)
    plain = Computes(function)
    parts = torch.tensor_split(x, 2)
    expected = sum(plain(part).square().mean().item() * len(part) for part in parts) / len(x)
    return run_local(pipe, x, target=torch.zeros(len(x))).loss, expected


@pytest.mark.parametrize(
    "is_short",
    [
        lambda n: max(n, 7) == 7,
        lambda n: min(n, 7) < 7,
        lambda n: n * 0.75 < 5,
        lambda n: n / 2 < 3.5,
        lambda n: n & 8 == 0,
    ],
)
def test_a_branch_on_a_computed_size_is_refused_where_it_goes_the_other_way(is_short: Any) -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        return model.c(model.b(h.sin() if is_short(x.shape[1]) else h.cos()))

    got, expected = loss_of(function, torch.randn(2, 6, 6), torch.randn(4, 6, 6))
    assert got == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match="branches on sizes"):
        loss_of(function, torch.randn(2, 6, 6), torch.randn(4, 8, 6))


def test_a_share_of_the_length_that_was_made_a_number_is_refused_at_other_lengths() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        return model.c(model.b(model.a(x)[:, : int(x.shape[1] * 0.75)]).tanh())

    got, expected = loss_of(function, torch.randn(2, 8, 6), torch.randn(4, 8, 6))
    assert got == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match=r"math.trunc\(0.75"):
        loss_of(function, torch.randn(2, 8, 6), torch.randn(4, 16, 6))


def test_resizing_by_a_factor_along_the_sequence_works_at_other_lengths() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        return model.c(model.b(nn.functional.interpolate(model.a(x).mT, scale_factor=0.5).mT).tanh())

    got, expected = loss_of(function, torch.randn(2, 8, 6), torch.randn(4, 12, 6))
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_condition_that_no_step_could_decide_is_refused_when_the_model_is_captured() -> None:
    captured = capture(lambda: Computes(lambda model, x: model.a(x)), (torch.randn(2, 6, 6),))
    (length,) = [symbol for symbol, name in captured.symbols.names.items() if name == "s1"]
    with pytest.raises(CaptureError, match="a condition on sizes"):
        captured.symbols.guards([sympy.Gt(sympy.cos(length), 0)])


@pytest.mark.parametrize(
    "pieces",
    [
        lambda h: h.chunk(4, 1),
        lambda h: h.chunk(chunks=4, dim=1),
        lambda h: h.split(2, 1),
    ],
)
def test_another_number_of_pieces_than_the_examples_is_refused(pieces: Any) -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        h, summed = model.a(x), 0
        for number, piece in enumerate(pieces(h)):
            summed = summed + (number + 1) * piece.mean(1, keepdim=True)
        return model.c(model.b(summed))

    got, expected = loss_of(function, torch.randn(2, 6, 6), torch.randn(4, 6, 6))
    assert got == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match=r"captured where .* == 3; here s1 = 8"):
        loss_of(function, torch.randn(2, 6, 6), torch.randn(4, 8, 6))


def test_pieces_of_the_batch_are_refused_for_a_chunk_that_gives_fewer() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        h, summed = model.a(x), 0
        for number, piece in enumerate(model.b(h).chunk(3, 0)):
            summed = summed + (number + 1) * piece.mean(0, keepdim=True)
        return model.c(h + summed)

    got, expected = loss_of(function, torch.randn(4, 6), torch.randn(8, 6))
    assert got == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match=r"here s0 = [35] is dimension 0"):
        loss_of(function, torch.randn(4, 6), torch.randn(10, 6))


def test_as_many_pieces_of_other_sizes_are_fine() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        q, k, v = model.a(x).chunk(3, -1)
        first, second = model.b(torch.cat([k, q * v, v], -1)).chunk(2, 1)
        last = model.c(x).tensor_split(2, 1)[1]
        return torch.cat([model.c(first + second.mean(1, keepdim=True)), last], 1)

    got, expected = loss_of(function, torch.randn(4, 6, 6), torch.randn(7, 9, 6))
    assert got == pytest.approx(expected, rel=1e-5)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


@pytest.mark.parametrize(
    "scaled",
    [
        lambda h, n: h * (n / 2),
        lambda h, n: h * (1 / n),
        lambda h, n: h * math.ceil(n / 2),
        lambda h, n: h * math.floor(n * 0.7),
        lambda h, n: h * round(n / 3),
        lambda h, n: h * round(n / 3, 2),
        lambda h, n: h * n**-0.5,
        lambda h, n: Scaled.apply(h, n / 2),
    ],
)
def test_numbers_computed_from_the_batch_size_follow_each_chunks_size(scaled: Any) -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        return model.c(model.b(scaled(model.a(x), x.shape[0])).tanh())

    got, expected = loss_of(function, torch.randn(4, 6), torch.randn(9, 6))
    assert got == pytest.approx(expected, rel=1e-5)
