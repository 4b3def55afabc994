"""Costs of nodes: every kind of operation runs on made-up operands, generators stay, sums are plausible."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.graph.capture.capture import Captured, capture
from stagekit.graph.cut.costs import measure
from stagekit.graph.cut.layout import lay_out
from stagekit.graph.cut.operands import operands


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.norm = nn.BatchNorm1d(16)
        self.small, self.large = nn.Linear(16, 16), nn.Linear(16, 65536)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens).flatten(0, 1)).view(4, 8, 16)
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        filled = self.small(x)
        filled[:, :4] = x[:, 4:]
        order = (tokens % 8).argsort(-1).unsqueeze(-1).expand(-1, -1, 16)
        return self.large(filled.gather(1, order).masked_fill(tokens.unsqueeze(-1) > 3, 0.0))


@functools.cache
def captured() -> Captured:
    return capture(Model, (torch.zeros(4, 8, dtype=torch.int64),), check=False)


def test_every_operation_runs_on_made_up_operands() -> None:
    for node in lay_out(captured()).work:
        args, kwargs = operands(captured(), node)
        with torch.no_grad():
            node.target(*args, **kwargs)  # type: ignore[operator]


def test_made_up_rows_of_an_embedding_are_spread_over_the_table() -> None:
    node = next(node for node in captured().graph.nodes if "embedding" in str(node.target))
    (_, indices, *_), _ = operands(captured(), node)
    assert indices.unique().numel() > 16
    assert int(indices.max()) < 1000


def test_measuring_leaves_generators_and_weighs_large_operations_more() -> None:
    state = torch.get_rng_state()
    nodes = [node for node in lay_out(captured()).nodes if node in lay_out(captured()).work]
    costs = measure(captured(), nodes)
    assert torch.equal(torch.get_rng_state(), state)
    linears = [node.name for node in nodes if "linear" in str(node.target)]
    small, large = (costs[name] for name in linears)  # 4,096 times the work: far beyond the noise of a loaded machine
    assert large.forward_s > small.forward_s and large.backward_s > small.backward_s


def test_a_backward_is_measured_in_halves_where_the_weight_can_wait_and_only_there() -> None:
    nodes = [node for node in lay_out(captured()).nodes if node in lay_out(captured()).work]
    for how in ("measured", "flops", "bytes"):
        costs = measure(captured(), nodes, how)
        halved = {node.name for node in nodes if costs[node.name].halves is not None}
        assert halved == {node.name for node in nodes if "linear" in str(node.target)}
        for name in halved:
            early, late = costs[name].halves or (0.0, 0.0)
            assert early > 0 and late > 0
    stage = captured().cut("layers", 1).spec.stages[0]
    assert stage.weight_grad_s > 0 and stage.input_grad_s > 0


def test_a_weight_that_another_operation_of_its_stage_reads_does_not_wait() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    tied = capture(Tied, (torch.zeros(4, 8),), check=False)
    together, (first, second) = tied.cut("balanced", 1).spec.stages[0], tied.cut(["two"], 2).spec.stages
    assert together.weight_grad_s == 0 and together.input_grad_s == together.backward_s
    assert first.weight_grad_s > 0 and second.weight_grad_s > 0
