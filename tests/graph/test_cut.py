"""Where stages begin, what they own, and the words for a cut that can't be."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from stagekit.errors import SplitError, UserError
from stagekit.examples.gpt import Program
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.capture.capture import Captured, capture


@functools.cache
def captured() -> Captured:
    program = Program(layers=4, width=32, heads=2, sequence=8, batch=4)
    return capture(program.build_model, *program.example_inputs(), seed=1)


def test_module_paths_name_where_stages_begin() -> None:
    cut = captured().cut(["blocks.1", "blocks.3"], 3)
    assert [stage.begins_at for stage in cut.spec.stages] == ["token", "blocks.1", "blocks.3"]
    assert {p.name.split(".")[1] for p in cut.spec.stages[1].parameters} == {"1", "2"}


def test_an_unknown_path_lists_the_nearest() -> None:
    with pytest.raises(SplitError, match=r"'block\.2'; nearest: .*blocks\.2"):
        captured().cut(["block.2"], 2)


def test_paths_that_do_not_make_the_stages_asked_for_are_refused() -> None:
    with pytest.raises(SplitError, match="1 module paths make 2 stages, but 3 were asked for"):
        captured().cut(["blocks.2"], 3)
    with pytest.raises(SplitError, match="list the paths in the order they run"):
        captured().cut(["blocks.2", "blocks.1"], 3)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(SplitError, match='use "balanced", "parameters", "layers"'):
        captured().cut("fair", 2)


def test_more_stages_than_cuts_are_refused_with_both_numbers() -> None:
    model = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),))
    with pytest.raises(SplitError, match="8 stages need 7 cuts, but the model has only 1 legal"):
        model.cut("balanced", 8)


def test_layers_and_parameters_spread_evenly() -> None:
    by_layers = captured().cut("layers", 4).spec
    assert [stage.begins_at.split(".")[:2] for stage in by_layers.stages[1:]] == [["blocks", str(i)] for i in (1, 2, 3)]
    by_bytes = captured().cut("parameters", 2).spec
    sizes = [sum(p.size_bytes for p in stage.parameters) for stage in by_bytes.stages]
    assert max(sizes) < 0.6 * sum(sizes)


def test_a_balanced_cut_tells_costs_and_its_gap() -> None:
    spec = captured().cut("balanced", 2).spec
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in spec.stages)
    assert "lower bound" in spec.split_report


def test_a_stage_holds_only_its_own_parameters() -> None:
    cut = captured().cut("layers", 4)
    module = cut.stage_module(2)
    names = [name for name, _ in module.named_parameters()]
    assert names == [p.name for p in cut.spec.stages[2].parameters]
    assert sum(p.numel() for p in module.parameters()) < 0.4 * sum(t.numel() for t in captured().tensors.values())
    assert all(p.requires_grad for p in module.parameters())


def test_the_buckets_of_a_stage_hold_each_parameter_once() -> None:
    cut = captured().cut("balanced", 2, buckets=BucketRule(10_000, 1_000))
    for index, stage in enumerate(cut.spec.stages):
        held = [name for bucket in stage.buckets for name in bucket.parameters]
        assert sorted(held) == sorted(p.name for p in stage.parameters)
        assert len(stage.buckets) > 1
        assert cut.stage_module(index).buckets == stage.buckets


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(SplitError, match="made for another model"):
        captured().cut("balanced", 2, at_nodes=["embedding", "nowhere"])


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(UserError, match="compile='nonsense' is no backend"):
        captured().cut("layers", 2).stage_module(0, compile="nonsense")


def test_a_stage_can_be_cast() -> None:
    module = captured().cut("layers", 2).stage_module(0, dtype=torch.float64)
    assert {p.dtype for p in module.parameters()} == {torch.float64}


@pytest.mark.parametrize("split", ["balanced", "parameters", "layers"])
def test_every_policy_measures_what_the_plan_predicts_with(split: str) -> None:
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in captured().cut(split, 2).spec.stages)


def test_costs_are_not_measured_when_nobody_asks() -> None:
    assert [stage.forward_s for stage in captured().cut("layers", 2, measured=False).spec.stages] == [0.0, 0.0]


class InRegions(nn.Module):
    """Regions inside each other, between layers that a cut may fall into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[1](x)
            with torch.no_grad():
                scale = self.layers[2](x)
            x = x * scale
        return self.layers[3](x.float())


def test_cutting_a_model_with_regions_leaves_none_of_them_on() -> None:
    capture(InRegions, (torch.randn(2, 4),), seed=1).cut("layers", 2, measured=False)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
