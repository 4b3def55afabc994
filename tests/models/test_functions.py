"""Custom autograd.Functions and checkpointed blocks keep their gradients when the model is cut and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Chain
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import capture
from stagekit.graph.passes.aliasing import is_random


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor, twice: bool) -> Tensor:
        ctx.save_for_backward(x, slope)
        ctx.factor = 2.0 if twice else 1.0
        return ctx.factor * x * torch.sigmoid(slope * x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, slope = ctx.saved_tensors
        s = torch.sigmoid(slope * x)
        grad = ctx.factor * grad
        for_slope = (grad * x * x * s * (1 - s)).sum() if ctx.needs_input_grad[1] else None
        return 3.0 * grad * (s + slope * x * s * (1 - s)), for_slope, None  # 3: not what autograd would give


swish = Swish.apply  # held from import on, as many libraries do


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -ctx.strength * grad, None


class StraightThrough(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * (ctx.saved_tensors[0].abs() < 1)


class Largest(Function):
    """Two outputs, one of them integers without gradient; takes a list and None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: list[Any], nothing: None) -> Any:
        values, indices = x.topk(options[0], -1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.width = x.shape[-1]
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        return 2 * grad.new_zeros(*grad.shape[:-1], ctx.width).scatter(-1, indices, grad), None, None


class Doubled(Function):
    """Writes its operand in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return 5 * grad


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return 7 * grad * ctx.saved_tensors[0]


class Nested(Function):
    """Differentiates another custom function inside its own forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            outer = Reversal.apply(inner, 0.5).sin() / rows
        ctx.save_for_backward(inner, outer)
        return outer.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        inner, outer = ctx.saved_tensors
        return torch.autograd.grad(outer, inner, grad)[0] * 2, None


class Awkward(nn.Module):
    """Every function above, one of them twice and one under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.slope = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = swish(self.layers[0](x), self.slope, True)
        h = Reversal.apply(self.layers[1](h), 0.5)
        h = h * StraightThrough.apply(self.layers[2](h))
        with torch.no_grad():
            scale = swish(h, self.frozen, False).mean()
        h = swish(self.layers[3](h), self.frozen, False) * scale
        h = Doubled.apply(h * 1.5) + swish(h, self.slope, False)
        h = Nested.apply(h, h.shape[0])
        values, order = Largest.apply(self.layers[4](h), [4], None)  # type: ignore[misc]
        return self.head(values), order


def x_of(rows: int = 5) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(3))


def check(build: Callable[[], nn.Module], chain: Chain, x: Tensor, tolerance: float = 1e-6) -> None:
    torch.manual_seed(0)
    module = build()
    expected = module(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    got = chain.forward((x.clone(),))
    got = got if isinstance(got, tuple) else (got,)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    chain.backward((got[0] ** 2).sum())
    (expected[0] ** 2).sum().backward()
    expected_grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    gradients = chain.gradients()
    assert gradients.keys() == expected_grads.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_grads.values())
    for name, gradient in expected_grads.items():  # a scalar's gradient may be a small sum of large terms
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_custom_functions_of_every_kind_keep_their_backward(stages: int) -> None:
    captured = capture(Awkward, (x_of(),))
    assert captured.self_check == "values"
    check(Awkward, Chain(captured.cut("parameters", stages)), x_of())
    check(Awkward, Chain(captured.cut("parameters", stages)), x_of(9))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_custom_functions_keep_their_backward_when_compiled(backend: str) -> None:
    captured = capture(Awkward, (x_of(),))
    check(Awkward, Chain(captured.cut("parameters", 2), compile=backend), x_of(), 1e-5)


def test_every_place_is_a_legal_cut_between_custom_functions() -> None:
    captured = capture(Awkward, (x_of(),), check=False)
    names = [node.name for node in captured.graph.nodes if node.op == "call_function"]
    assert {"swish", "reversal", "straight_through", "doubled", "largest"} <= set(names)
    check(Awkward, Chain(captured.cut(["layers.1", "layers.2", "layers.3", "layers.4"], 5)), x_of())


def test_random_numbers_of_a_custom_function_do_not_depend_on_the_cut() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + Noisy.apply(torch.dropout(layer(x), 0.2, True))
            return x

    captured = capture(Model, (x_of(),))
    assert sum(is_random(node) for node in captured.graph.nodes) == 6
    results = []
    for stages in (1, 2, 3):
        chain = Chain(captured.cut("balanced", stages))
        output = chain.forward((x_of(),), seed_base=4)
        chain.backward(output.sum())
        results.append((output, chain.gradients()))
    for output, gradients in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(gradients[name], grad) for name, grad in results[0][1].items())


def test_a_distribution_that_torch_samples_with_a_function_of_its_own_trains_alike_under_every_cut() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            weights = torch.distributions.Dirichlet(h.abs() + 1, validate_args=False).rsample()
            beta = torch.distributions.Beta(h.detach().abs() + 1, h.detach().abs() + 1, validate_args=False)
            return self.second(h * weights * beta.sample())

    captured = capture(Model, (x_of(),))
    assert captured.self_check == "values"
    gradients = []
    for stages in (1, 2):
        chain = Chain(captured.cut("parameters", stages))
        chain.backward(chain.forward((x_of(),), seed_base=4).square().sum())
        gradients.append(chain.gradients())
    assert gradients[0]["first.weight"].abs().max() > 0
    assert all(torch.equal(gradients[1][name], grad) for name, grad in gradients[0].items())


class Checkpointed(nn.Module):
    """Blocks that are recomputed in the backward; the very first one gets an input without gradient."""

    def __init__(self, reentrant: bool, p: float) -> None:
        super().__init__()
        self.reentrant, self.p = reentrant, p
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def block(self, x: Tensor, i: int) -> Tensor:
        return x + torch.dropout(torch.tanh(self.layers[i](x)), self.p, True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.reentrant:
            x = checkpoint(self.block, x, 0, use_reentrant=False)  # type: ignore[assignment]
        x = self.layers[1](x)
        for i in (2, 3, 4):
            x = checkpoint(self.block, x, i, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_dissolve_and_keep_their_gradients(reentrant: bool) -> None:
    captured = capture(lambda: Checkpointed(reentrant, 0.0), (x_of(),))
    for stages in (2, 4):
        check(lambda: Checkpointed(reentrant, 0.0), Chain(captured.cut("balanced", stages)), x_of())
    with_dropout = capture(lambda: Checkpointed(reentrant, 0.3), (x_of(),))
    assert with_dropout.self_check == "values"


def test_a_reentrant_checkpoint_of_inputs_without_gradient_trains_nothing_as_in_torch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True))  # type: ignore[no-any-return]

    check(Model, Chain(capture(Model, (x_of(),)).cut("balanced", 2)), x_of())


class ReadsAParameter(nn.Module):
    """Its Function reaches for a parameter that is not handed to `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

        class Hidden(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, owner: nn.Module) -> Tensor:
                return x @ owner.layer.weight  # type: ignore[no-any-return, union-attr]

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
                return grad, None

        self.hidden = Hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden.apply(self.layer(x), self)  # type: ignore[no-any-return]


def test_a_function_that_reads_what_it_is_not_given_is_refused_with_the_line() -> None:
    message = rf'Function Hidden at "{__file__}", line \d+, in forward uses layer\.weight, which .*pass every parameter'
    with pytest.raises(CaptureError, match=message):
        capture(ReadsAParameter(), (x_of(),))


class DrawsInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * torch.rand_like(grad)


def test_a_function_that_draws_numbers_in_its_backward_is_refused() -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return DrawsInBackward.apply(self[0](x))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"DrawsInBackward at .* draws random numbers in its backward"):
        capture(Model(nn.Linear(8, 8)), (x_of(),))


def test_the_capture_of_a_custom_function_is_the_same_twice() -> None:
    module = Awkward()
    before = copy.deepcopy(module.state_dict())
    first, second = (capture(module, (x_of(),), check=False) for _ in range(2))
    assert first.graph_hash == second.graph_hash
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
