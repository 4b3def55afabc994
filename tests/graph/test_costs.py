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
