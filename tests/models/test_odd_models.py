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
