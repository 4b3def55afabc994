"""The chain of stages is proven against the capture for every cut; each way to be wrong is found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import BugError
from stagekit.graph.capture.capture import Captured, capture
from stagekit.graph.compile.randomness import reseed
from stagekit.graph.cut.layout import lay_out
from stagekit.graph.cut.stages import Chain, StageGraph, build_chain
from stagekit.graph.cut.verify import verify_chain


class Model(nn.Module):
    """Two layers, a counter, dropout, a region without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        h = nn.functional.dropout(self.first(x), 0.5)
        with torch.no_grad():
            scale = h.abs().mean()
        return self.second(torch.tanh(h)) * scale - x


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Model, (torch.randn(3, 4),), check=False)


def parts(captured: Captured) -> tuple[Any, dict[Any, int], Chain]:
    """Return the layout, an assignment to two stages (from tanh on: the second) and the chain."""
    layout = lay_out(captured)
    begin = layout.position("tanh")
    assert begin is not None
    stage_of = {node: int(i >= begin) for i, node in enumerate(layout.nodes) if node in layout.work}
    return layout, stage_of, build_chain(captured, layout, stage_of, 2)


def with_stage(chain: Chain, stage: StageGraph) -> Chain:
    stages = [stage if other.index == stage.index else other for other in chain.stages]
    return replace(chain, stages=tuple(stages))


def node(stage: StageGraph, name: str) -> Any:
    return next(n for n in stage.graph.nodes if n.name == name)


def test_a_chain_as_built_is_accepted(captured: Captured) -> None:
    verify_chain(captured, *parts(captured))


def test_an_operation_with_another_operand_is_found(captured: Captured) -> None:
    layout, stage_of, chain = parts(captured)
    stage = chain.stages[1]
    node(stage, "tanh").args = (node(stage, "x"),)
    with pytest.raises(BugError, match=r"stage 1: %tanh .* is not %tanh"):
        verify_chain(captured, layout, stage_of, chain)


def test_an_operation_in_two_stages_is_found(captured: Captured) -> None:
    layout, stage_of, chain = parts(captured)
    stage_of = {n: 0 if n.name == "tanh" else index for n, index in stage_of.items()}
    with pytest.raises(BugError, match=r"tanh belongs to stage 0, but is in \[1\]"):
        verify_chain(captured, layout, stage_of, chain)


def test_a_wrong_seed_number_is_found(captured: Captured) -> None:
    layout, stage_of, chain = parts(captured)
    seeding = next(n for n in chain.stages[0].graph.nodes if n.target is reseed)
    seeding.args = (seeding.args[0], 7, *seeding.args[2:])
    with pytest.raises(BugError, match="stage 0: dropout is not seeded as operation 0"):
        verify_chain(captured, layout, stage_of, chain)


def test_an_output_that_shares_memory_with_an_input_is_found(captured: Captured) -> None:
    layout, stage_of, chain = parts(captured)
    stage = chain.stages[0]
    shared = {**stage.storages, stage.outputs[0]: stage.storages["x"]}
    with pytest.raises(BugError, match=r"stage 0: its output .* shares memory with what it was given"):
        verify_chain(captured, layout, stage_of, with_stage(chain, replace(stage, storages=shared)))


def test_an_edge_that_nobody_makes_is_found(captured: Captured) -> None:
    layout, stage_of, chain = parts(captured)
    edges = (replace(chain.edges[0], targets=(1, 2)), *chain.edges[1:])
    with pytest.raises(BugError, match="are not what stages make and read"):
        verify_chain(captured, layout, stage_of, replace(chain, edges=edges))
