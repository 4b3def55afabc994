"""The self-check finds what a capture gets wrong, and leaves everything of the user as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import Captured, capture
from stagekit.graph.capture.selfcheck import check_structure, self_check
from stagekit.graph.capture.specs import flatten_named


class Model(nn.Module):
    """Two outputs of different layers, a checkpointed block and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.first(x))
        h = checkpoint(self.second, h, use_reentrant=True)  # type: ignore[assignment]
        return self.third(h), h.detach() * 2


def x_of() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def checked(module: nn.Module, change: Callable[[fx.Graph], None], structural: bool) -> None:
    captured = capture(module, (x_of(),), check=False)
    change(captured.graph)
    leaves = flatten_named((x_of(),), {})[0]
    if structural:
        check_structure(captured, leaves)
    else:
        self_check(captured, module, leaves, 0)


def named(graph: fx.Graph, part: str) -> fx.Node:
    return next(node for node in graph.nodes if part in node.name and node.op == "call_function")


def nothing(graph: fx.Graph) -> None:
    pass


def detaches(graph: fx.Graph) -> None:
    linear = named(graph, "linear")
    with graph.inserting_after(linear):
        cut_off = graph.call_function(torch.ops.aten.detach.default, (linear,))
    linear.replace_all_uses_with(cut_off, delete_user_cb=lambda user: user is not cut_off)


def doubles(graph: fx.Graph) -> None:
    linear = named(graph, "linear")
    with graph.inserting_after(linear):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (linear, 2.0))
    linear.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)


def swaps_outputs(graph: fx.Graph) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = (tuple(reversed(output.args[0])),)


def rounds(graph: fx.Graph) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        rounded = graph.call_function(torch.ops.aten.to.dtype, (output.args[0][0], torch.float64))
    output.args = ((rounded, output.args[0][1]),)


@pytest.mark.parametrize("structural", [False, True])
def test_a_right_capture_passes_with_its_checkpoints_dissolved(structural: bool) -> None:
    checked(Model(), nothing, structural)


@pytest.mark.parametrize(
    ("change", "structural", "message"),
    [
        (detaches, False, r"gradient of first\.\w+ is None instead of a tensor"),
        (detaches, True, r"do not reach the same parameters from output 0; the first one is first\.bias"),
        (doubles, False, r"buffer norm\.running_mean differs"),
        (swaps_outputs, True, r"output 0 is .*False\) instead of .*True\)"),
        (rounds, True, r"output 0 is .*float64.* instead of .*float32"),
    ],
)
def test_a_wrong_capture_is_found_and_says_where(change: Any, structural: bool, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        checked(Model(), change, structural)


def test_the_check_leaves_module_gradients_modes_inputs_and_generator_alone() -> None:
    module, x = Model(), x_of().requires_grad_()
    module.norm.eval()
    module(x)[0].sum().backward()
    before = copy.deepcopy(module.state_dict())
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    given, given_grad, state = x.detach().clone(), x.grad, torch.get_rng_state()
    captured: Captured = capture(module, (x,))
    assert captured.self_check == "values"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.detach(), given)
    assert x.grad is given_grad
    assert [module.training, module.norm.training] == [True, False]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in module.named_parameters() if p.grad is not None)


class Rounded(nn.Module):
    """The bias in front of BatchNorm has a gradient of rounding errors; a huge constant is among the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("limit", torch.tensor(torch.finfo(torch.float32).min))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def test_gradients_of_rounding_errors_pass_and_buffers_beside_huge_ones_are_still_compared() -> None:
    def scales(graph: fx.Graph, by: float) -> None:
        linear = named(graph, "linear")
        with graph.inserting_after(linear):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (linear, by))
        linear.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    torch.manual_seed(0)
    checked(Rounded(), lambda graph: scales(graph, 1 + 1e-6), False)
    with pytest.raises(CaptureError, match=r"buffer norm\.running_\w+ differs"):
        checked(Rounded(), lambda graph: scales(graph, 2.0), False)
