"""A replayed constructor gives what the constructor gives, bit for bit, and only what is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.examples import digits, gpt, gpt2
from stagekit.graph.build import ModuleValues, RebuiltValues, RecordedValues, build_for_real, named_tensors, open_model


class ManyInits(nn.Module):
    """Inits that go through views, decompositions and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.utils.parametrizations.weight_norm(nn.Linear(80, 80))
        self.plain = nn.Parameter(nn.init.orthogonal_(torch.empty(90, 90)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(70, 70), std=0.02))
        self.padded = nn.Embedding(100, 64, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(128, 64) / 8)
        self.small = nn.Parameter(torch.rand(5) + 1)
        self.register_buffer("mask", torch.tril(torch.ones(96, 96)), persistent=False)
        self.register_buffer("frequencies", torch.outer(torch.arange(100.0), torch.linspace(0, 1, 64)))
        self.view = self.scaled.data[:4]


class SeedsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(80, 80)
        torch.manual_seed(123)
        self.after = nn.Linear(80, 80)


class LooksAtRandomValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(80, 80)
        self.scale = float(self.layer.weight.std())
        self.scaled = nn.Parameter(torch.full((80, 80), self.scale))


class LoadsValues(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(80, 80)
        self.other = nn.Linear(80, 80)
        with torch.no_grad():
            self.layer.weight.copy_(values)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt.Program(width=64).build_model,
    "digits": digits.Program(width=32).build_model,
    "gpt2": gpt2.Program().build_model,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(64, 64, 2),
    "many inits": ManyInits,
    "seeds itself": SeedsItself,
    "looks at random values": LooksAtRandomValues,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_values_equal_those_of_a_real_build_from_the_same_seed(name: str) -> None:
    state = torch.get_rng_state()
    _, source = open_model(BUILDERS[name], seed=3)
    real = dict(named_tensors(build_for_real(BUILDERS[name], seed=3)))
    values = source.take(list(real))
    for key, value in real.items():
        assert torch.equal(values[key], value), key
        assert values[key].stride() == value.stride(), key
    half = list(real)[len(real) // 2 :]
    assert all(torch.equal(value, real[key]) for key, value in source.take(half).items())
    assert torch.equal(state, torch.get_rng_state()), "the caller's generator is left alone"


def test_a_recorded_model_holds_no_large_values() -> None:
    module, source = open_model(BUILDERS["gpt"], seed=0)
    assert isinstance(source, RecordedValues)
    assert all(p.is_meta for p in module.parameters() if p.numel() > 4096)


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"looks at random values"}))
def test_ordinary_constructors_are_recorded(name: str) -> None:
    _, source = open_model(BUILDERS[name], seed=0)
    assert isinstance(source, RecordedValues), source.note


def test_a_constructor_that_looks_at_random_values_is_built_for_real() -> None:
    _, source = open_model(LooksAtRandomValues, seed=0)
    assert isinstance(source, RebuiltValues)
    assert "looks at a value" in source.note


def test_loaded_values_are_kept() -> None:
    values = torch.arange(6400.0).view(80, 80)
    _, source = open_model(lambda: LoadsValues(values), seed=0)
    taken = source.take(["layer.weight", "other.weight"])
    assert torch.equal(taken["layer.weight"], values)
    assert taken["layer.weight"].data_ptr() != values.data_ptr()
    assert torch.equal(taken["other.weight"], build_for_real(lambda: LoadsValues(values), 0).other.weight)


def test_tied_weights_are_one_value() -> None:
    module, _ = open_model(BUILDERS["gpt2"], seed=0)
    assert module.lm_head.weight is module.transformer.wte.weight


def test_a_given_module_is_copied_as_it_is_now() -> None:
    module = nn.Linear(4, 4)
    same, source = open_model(module, seed=0)
    assert same is module
    assert isinstance(source, ModuleValues)
    module.weight.data.fill_(2.0)
    taken = source.take(["weight"])["weight"]
    module.weight.data.fill_(3.0)
    assert torch.equal(taken, torch.full((4, 4), 2.0))


def test_a_meta_parameter_without_a_value_is_named() -> None:
    lost = nn.Parameter(torch.empty(100, 100, device="meta"))

    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_parameter("lost", lost)
        return module

    with pytest.raises(CaptureError, match=r"lost is on the meta device.*initialise it"):
        open_model(build, seed=0)


def test_a_constructor_must_return_a_module() -> None:
    with pytest.raises(CaptureError, match=r"returned int; return a torch\.nn\.Module"):
        open_model(lambda: 3, seed=0)  # type: ignore[arg-type,return-value]
