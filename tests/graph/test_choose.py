"""The policies of `split`: costs, memory, speeds, blocks, buckets. Positions only; no stage is built."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import SplitError
from stagekit.graph.capture.capture import Captured, capture
from stagekit.graph.cut.choose import Choice, at_speeds, choose, module_paths
from stagekit.graph.cut.costs import Cost
from stagekit.graph.cut.estimates import tensor_bytes
from stagekit.graph.cut.layout import Layout, lay_out
from stagekit.plan.split import Balanced, Usage


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def model() -> tuple[Captured, Layout]:
    captured = capture(Model, (torch.zeros(4, 8, dtype=torch.int64),), seed=1, check=False)
    return captured, lay_out(captured)


def chosen(split: str | list[str] | Balanced, stages: int, usage: Usage | None = None) -> Choice:
    return choose(*model(), split, stages, None, measured=False, usage=usage)


def parameter_bytes(choice: Choice) -> list[int]:
    """Bytes of the parameters that each stage reads."""
    captured, layout = model()
    ends = [*choice.begins[1:], len(layout.nodes)]
    read = [
        {
            n
            for node in layout.nodes[a:b]
            for n in node.all_input_nodes
            if n.op == "placeholder" and n.meta["requires_grad"]
        }
        for a, b in zip(choice.begins, ends, strict=True)
    ]
    return [sum(tensor_bytes(captured, n.meta["val"]) for n in nodes) for nodes in read]


def needed_bytes(choice: Choice) -> float:
    number, unit = choice.report.partition("largest stage ")[2].split()[:2]
    return float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]


@pytest.mark.parametrize("costs", ["flops", "bytes"])
def test_costs_can_be_counted_instead_of_measured(costs: str) -> None:
    choice = chosen(Balanced(costs=costs), 4)
    assert f"balanced on {costs}: largest stage" in choice.report
    assert not choice.costs
    assert chosen(f"balanced:{costs}", 4).begins == choice.begins


@pytest.mark.parametrize("costs", ["flops", "bytes"])
def test_counted_costs_spread_equal_blocks_of_a_small_model_evenly(costs: str) -> None:
    sizes = parameter_bytes(chosen(Balanced(costs=costs), 3))
    assert max(sizes) < 2.2 * min(sizes), sizes


def test_unknown_costs_are_refused() -> None:
    with pytest.raises(SplitError, match="costs is 'guessed'; there are measured, flops, bytes"):
        Balanced(costs="guessed")


def test_a_memory_cap_moves_the_cut() -> None:
    usage = Usage("1f1b", 8)
    loose = chosen(Balanced("flops", memory_bytes=1 << 30), 4, usage)
    assert "of 1 GiB" in loose.report
    cap = int(needed_bytes(loose) * 0.97)
    tight = chosen(Balanced("flops", memory_bytes=cap), 4, usage)
    assert tight.begins != loose.begins
    assert needed_bytes(tight) <= cap


def test_an_impossible_cap_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        SplitError, match=r"needs [\d.]+ KiB in stage \d with \d chunks in flight, the cap is 9\.766 KiB"
    ):
        chosen(Balanced("flops", memory_bytes=10_000), 4, Usage("1f1b", 8))


def test_recomputing_needs_less_memory() -> None:
    wish = Balanced("flops", memory_bytes=1 << 30)
    kept, again = (needed_bytes(chosen(wish, 2, Usage("gpipe", 16, recompute=r))) for r in (False, True))
    assert again < 0.5 * kept


def test_the_estimate_counts_weights_gradients_optimizer_state_and_what_chunks_save() -> None:
    def needed(chunks: int, optimizer_state: float) -> int:
        wish = Balanced("flops", memory_bytes=1 << 30, optimizer_state=optimizer_state)
        return round(needed_bytes(chosen(wish, 1, Usage("gpipe", chunks))))

    total = sum(parameter_bytes(chosen("layers", 1)))
    assert needed(1, 2.0) - needed(1, 0.0) == pytest.approx(2 * total, rel=0.01)
    assert needed(3, 0.0) - needed(2, 0.0) == pytest.approx(needed(2, 0.0) - needed(1, 0.0), rel=0.05)


def test_cuts_can_be_kept_to_the_beginnings_of_blocks() -> None:
    _, layout = model()
    choice = chosen(Balanced("flops", block_boundaries=True), 3)
    for begin in choice.begins[1:]:
        block = next(path for path in module_paths(layout.nodes[begin]) if path.startswith("blocks."))
        before = [path for node in layout.nodes[:begin] for path in module_paths(node)]
        assert block not in before
    with pytest.raises(SplitError, match="only 5 blocks can begin one"):
        chosen(Balanced("flops", block_boundaries=True), 6)


def test_a_faster_rank_gets_more_work() -> None:
    first = [parameter_bytes(chosen(Balanced("flops", speeds=s), 2))[0] for s in ((3.0, 1.0), (1.0, 1.0), (1.0, 3.0))]
    assert first[0] > first[1] > first[2]


def test_the_plan_predicts_each_stage_at_the_speed_of_its_rank() -> None:
    captured, layout = model()
    wish = Balanced("flops", speeds=(2.0, 0.5))
    choice = choose(captured, layout, wish, 2, None, measured=True)
    assert "on flops, speeds 2, 0.5" in choice.report
    plain = {node: Cost(1.0, 3.0) for node in choice.costs}
    told = at_speeds(layout, replace(choice, costs=plain), [2.0, 0.5])
    first = {node.name for node in layout.nodes[: choice.begins[1]]}
    assert {(name in first, cost.forward_s, cost.backward_s) for name, cost in told.items()} == {
        (True, 0.5, 1.5),
        (False, 2.0, 6.0),
    }


def test_module_paths_that_can_not_be_are_told_with_those_that_can() -> None:
    with pytest.raises(SplitError, match=r"'zzz'; a stage can begin at blocks, blocks\.0, .*, …"):
        chosen(["zzz"], 2)
    with pytest.raises(SplitError, match=r"'blocks\.9'; nearest: blocks\."):
        chosen(["blocks.9"], 2)
    with pytest.raises(SplitError, match=r"'blocks\.1' is named twice"):
        chosen(["blocks.1", "blocks.1"], 3)


def test_a_list_of_modules_begins_at_its_first_child() -> None:
    assert chosen(["blocks", "head"], 3).begins == chosen(["blocks.0", "head"], 3).begins


def test_speeds_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(SplitError, match="speeds names 3 ranks, but 2 stages run on 2"):
        chosen(Balanced("flops", speeds=(1.0, 1.0, 1.0)), 2)


def test_the_ddp_rule_makes_as_many_stages_as_it_makes() -> None:
    with pytest.raises(SplitError, match=r"a bucket of 4096 bytes makes 6 stages of this model, but 7"):
        chosen("bucket:4KiB", 7)
    choice = chosen("bucket:4KiB", 6)
    assert all(size >= 4 << 10 for size in parameter_bytes(choice)[1:])
    assert set(choice.begins[1:]) <= set(model()[1].legal)


@pytest.mark.parametrize("text", ["bucket:25 parsecs", "bucket:0", "bucket:"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SplitError, match=r"is no size of at least one byte|split is 'bucket:'"):
        chosen(text, 2)


def test_several_stages_of_a_rank_are_balanced_together() -> None:
    assert "largest rank" in chosen("balanced:flops", 4, Usage("gpipe", 4, stages_per_rank=2)).report
