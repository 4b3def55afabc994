"""Models that look as if they could not be captured and are right: cut in two they compute what the plain module does."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import Chain
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import stagekit
from stagekit.graph.capture.capture import capture
from stagekit.graph.capture.copies import twin_of
from stagekit.graph.capture.refusals import unwrapped
from stagekit.testing import run_local


class Model(nn.Module):
    """Runs the function that a test gives between two layers, or on what both return."""

    def __init__(self, middle: Callable[..., Any], *, last: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle, self.last = middle, last
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        if self.last:
            h = torch.tanh(self.first(x))
            return self.middle(h, self.second(h))
        return self.second(self.middle(self, self.first(x), x))


@dataclasses.dataclass
class Pair:
    """An output that is no pytree until somebody registers it."""

    left: Tensor
    right: dict[str, Any]


Named = namedtuple("Named", "first second")


def locked(model: Any, h: Tensor, x: Tensor) -> Tensor:
    with model.lock:
        return h + 1


def never_dropped(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return x if model.training and torch.rand([]) < model.rate else h.sin()


def always_kept(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.sin() if torch.rand([]) <= 1.0 else x


def logged(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.mean = h.detach().mean().item()
    model.calls = 1
    return h.sin()


def reassigned(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.average = 0.9 * model.average + 0.1 * h.detach().mean(0)
    return h + model.average


def other_way_when_compiled(model: Any, h: Tensor, x: Tensor) -> Tensor:
    mask = None if torch.compiler.is_compiling() else torch.ones_like(h)
    return h * mask[:, :]  # type: ignore[index]


def converted_to_what_it_is(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.second = model.second.to(h.dtype)
    return h.sin()


def view_without_gradient(h: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        halves = after.view(-1, 2, 3)
    after.mul_(2)
    return after + h, halves


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(nn.Linear(6, 6)), nn.Linear(6, 6))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def with_buffer() -> nn.Module:
    model = Model(reassigned)
    model.register_buffer("average", torch.zeros(6))
    return model


def cases() -> Iterator[Any]:
    old, new = nn.utils, nn.utils.parametrizations
    yield "a lock", lambda: Model(locked, lock=threading.Lock())
    yield "layers dropped at a rate of zero", lambda: Model(never_dropped, rate=0.0)
    yield "layers kept at a rate of one", lambda: Model(always_kept)
    yield "a value that is only logged", lambda: Model(logged)
    yield "a buffer that is assigned anew", with_buffer
    yield "another branch when compiled, which fails", lambda: Model(other_way_when_compiled)
    yield "a layer converted to its own dtype", lambda: Model(converted_to_what_it_is)
    yield "a dataclass", lambda: Model(lambda a, b: Pair(a, {"b": b, "none": None, "word": "x"}), last=True)
    yield "a named tuple", lambda: Model(lambda a, b: Named(a, [b, {"twice": b}]), last=True)
    for kind in (new.weight_norm, old.weight_norm, new.spectral_norm, old.spectral_norm):
        yield f"{kind.__module__.split('.')[-1]}.{kind.__name__}", lambda kind=kind: normed(kind)
    yield "forward hooks", hooked
    yield "a compiled model", lambda: torch.compile(Model(lambda model, h, x: h.sin()))
    yield (
        "mixed dtypes",
        lambda: Model(
            lambda model, h, x: (h.bfloat16() * model.scale).float(), scale=nn.Parameter(torch.ones(6).bfloat16())
        ),
    )
    yield (
        "complex parameters",
        lambda: Model(
            lambda model, h, x: (h * model.phase).abs(), phase=nn.Parameter(torch.ones(6, dtype=torch.complex64))
        ),
    )


CASES = dict(cases())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_an_odd_model_that_is_right_is_cut_as_any_other(name: str) -> None:
    torch.manual_seed(0)
    model, x = CASES[name](), torch.randn(4, 6)
    captured = capture(model, (x,))
    assert captured.self_check == "values"
    reference = twin_of(unwrapped(model))  # type: ignore[arg-type]
    chain = Chain(captured.cut("parameters", 2))
    assert chain.state_dict().keys() == reference.state_dict().keys()
    for _ in range(2):
        expected, got = reference(x), chain.forward((copy.deepcopy(x),))
        assert type(got) is type(expected)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) if isinstance(a, Tensor) else a == b
        for output, backward in ((expected, Tensor.backward), (got, chain.backward)):
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            backward(torch.stack([leaf.sum() for leaf in tensors]).sum())
    gradients = chain.gradients()
    for key, parameter in reference.named_parameters():
        assert torch.allclose(gradients[key], parameter.grad, rtol=1e-4, atol=1e-5), key
    for key, value in reference.state_dict().items():
        assert torch.allclose(chain.state_dict()[key], value, rtol=1e-5, atol=1e-6), key


def test_a_view_taken_without_gradients_of_a_value_that_crosses_a_cut_trains_as_in_the_model() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            with torch.no_grad():
                view = h.view(-1, 2, 3)
            return self.c(h) + (self.b(x).view(-1, 2, 3) * view).flatten(1)

    x = torch.randn(4, 6)
    torch.manual_seed(0)
    plain = Views()
    plain(x).square().mean().backward()
    pipe = stagekit.pipeline(
        Views, args=(x[:2],), loss_fn=lambda output, target: output.square().mean(), stages=3, chunks=2
    )
    grads = run_local(pipe, x, target=torch.zeros(4)).grads
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def remembers_a_table(model: Any, h: Tensor, x: Tensor) -> Tensor:
    if not hasattr(model, "table"):
        model.table = torch.arange(6.0)
    return h + model.table


def test_a_table_born_in_the_first_forward_of_a_constructed_model_is_made_in_every_chunk() -> None:
    x, target = torch.randn(8, 6), torch.randn(8, 6)

    def mean_square(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    pipe = stagekit.pipeline(
        lambda: Model(remembers_a_table),
        args=(x[:4],),
        loss_fn=mean_square,
        stages=2,
        split=["second"],
        chunks=2,
        seed=3,
    )
    torch.manual_seed(3)
    expected = mean_square(Model(remembers_a_table)(x), target)
    assert run_local(pipe, x, target=target).loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_view_taken_without_gradients_may_be_returned_though_its_memory_is_written_later() -> None:
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    model = Model(view_without_gradient, last=True)

    def first_only(output: Any, target: Tensor) -> Tensor:
        return ((output[0] - target) ** 2).mean()

    pipe = stagekit.pipeline(model, args=(x[:4],), loss_fn=first_only, stages=2, chunks=2)
    expected = first_only(model(x), target)
    expected.backward()
    got = run_local(pipe, x, target=target)
    assert got.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got.grads[name], parameter.grad, rtol=1e-4, atol=1e-6)
