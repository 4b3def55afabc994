"""A replayed constructor gives what the constructor gives, bit for bit, and only what is asked for."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError, UserError
from stagekit.examples import digits, gpt
from stagekit.graph.values.build import (
    ModuleValues,
    RebuiltValues,
    RecordedValues,
    Start,
    build_for_real,
    named_tensors,
    one_at_a_time,
    open_model,
)
from tests.graph.constructors import BUILT, RECORDED, Made

EXAMPLES: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt.Program(width=64).build_model,
    "digits": digits.Program(width=32).build_model,
}
ALL = EXAMPLES | RECORDED | BUILT


def _equal(a: Tensor, b: Tensor) -> bool:
    same_layout = a.stride() == b.stride() and a.dtype == b.dtype
    return same_layout and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


@pytest.mark.parametrize("name", ALL)
def test_values_equal_those_of_a_real_build_from_the_same_seed(name: str) -> None:
    state = torch.get_rng_state()
    _, source = open_model(ALL[name], seed=3)
    real = dict(named_tensors(build_for_real(ALL[name], seed=3)))
    values = source.take(list(real))
    assert not [key for key, value in real.items() if not _equal(values[key], value)]
    half = list(real)[len(real) // 2 :]
    assert all(_equal(value, real[key]) for key, value in source.take(half).items())
    assert torch.equal(state, torch.get_rng_state()), "the caller's generator is left alone"
    assert type(source) is (RebuiltValues if name in BUILT else RecordedValues), source.note


def test_after_recording_tensors_are_torchs_own_again() -> None:
    before = (torch.Tensor.is_meta, torch.Tensor.device, nn.init._no_grad_trunc_normal_)
    open_model(RECORDED["looks_at_random_values"], seed=3)
    open_model(BUILT["numpy_writes_large"], seed=3)
    assert before == (torch.Tensor.is_meta, torch.Tensor.device, nn.init._no_grad_trunc_normal_)
    assert torch.empty(2, device="meta").is_meta


def test_a_recorded_model_holds_no_large_values() -> None:
    module, source = open_model(EXAMPLES["gpt"], seed=0)
    assert isinstance(source, RecordedValues)
    assert all(p.is_meta for p in module.parameters() if p.numel() > 4096)


@pytest.mark.parametrize("name", sorted(set(EXAMPLES | RECORDED) - {"own_generators", "looks_at_random_values"}))
def test_per_op_draws_the_same_distributions_from_another_start(name: str) -> None:
    build = ALL[name]
    module, source = open_model(build, 3, Start("per_op"))
    stream = open_model(build, 3)[1]
    names = [key for key, _ in named_tensors(module)]
    together = source.take(names)
    for key in names:
        assert _equal(source.take([key])[key], together[key]), "the same whatever else is taken"
    for key, value in stream.take(names).items():
        if value.is_floating_point() and value.numel() > 4096 and name not in ("other_generators", "many_draws"):
            assert torch.allclose(together[key].float().std(), value.float().std(), rtol=0.1, atol=1e-3), key
    assert not source.equals_build and "per_op" in source.note


def test_per_op_differs_from_stream_and_between_seeds() -> None:
    def first(seed: int, init: str) -> Tensor:
        return open_model(EXAMPLES["gpt"], seed, Start(init))[1].take(["head.weight"])["head.weight"]

    assert not torch.equal(first(1, "per_op"), first(1, "stream"))
    assert not torch.equal(first(1, "per_op"), first(2, "per_op"))


def test_a_model_above_the_limit_is_drawn_per_op_unless_stream_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagekit.graph.values.build.STREAM_LIMIT", 1000)
    assert "because the model has more than" in open_model(EXAMPLES["gpt"], 0)[1].note
    assert open_model(EXAMPLES["gpt"], 0, Start("stream"))[1].equals_build


def test_an_unknown_init_is_refused() -> None:
    with pytest.raises(UserError, match="init='random' is none of stream, per_op"):
        open_model(EXAMPLES["gpt"], 0, Start("random"))
    with pytest.raises(UserError, match="the model is a module, whose values are taken as they are"):
        open_model(nn.Linear(2, 2), 0, Start("stream"))


def test_the_note_of_a_real_build_says_what_it_costs_and_what_to_do() -> None:
    module, source = open_model(BUILT["loads_much"], seed=0)
    assert "the whole model (34 MiB) is built in every worker, one of a node at a time" in source.note
    assert "more than 32 MiB from outside" in source.note and "weights:" in source.note
    assert all(p.is_meta for p in module.parameters()), "the values are dropped again"


def _hold(folder: Path, pipe: Any) -> None:
    with one_at_a_time(folder):
        pipe.send("in")
        pipe.poll(30)


def test_whole_models_are_built_one_at_a_time_and_a_dead_process_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    (first_end, first_other), (second_end, second_other) = context.Pipe(), context.Pipe()
    first = context.Process(target=_hold, args=(tmp_path, first_other))
    second = context.Process(target=_hold, args=(tmp_path, second_other))
    first.start()
    assert first_end.poll(30)
    second.start()
    assert not second_end.poll(0.2)
    first.kill()
    assert second_end.poll(30)
    second_end.send("leave")
    first.join()
    second.join()


def test_loaded_values_are_kept() -> None:
    values = torch.arange(6400.0).view(80, 80)

    def build() -> nn.Module:
        def fill(module: nn.Module) -> None:
            module.layer, module.other = nn.Linear(80, 80), nn.Linear(80, 80)
            module.layer.weight.data.copy_(values)

        return Made(fill)

    _, source = open_model(build, seed=0)
    taken = source.take(["layer.weight", "other.weight"])
    assert torch.equal(taken["layer.weight"], values)
    assert taken["layer.weight"].data_ptr() != values.data_ptr()
    assert torch.equal(taken["other.weight"], build_for_real(build, 0).other.weight)


@functools.cache
def _cached_table() -> Tensor:
    return torch.outer(torch.arange(100.0), torch.rand(90))


def test_tensors_outside_of_the_modules_names_have_their_values_after_recording() -> None:
    def build() -> nn.Module:
        def fill(module: nn.Module) -> None:
            module.layer = nn.Linear(90, 100)
            module.register_buffer("table", _cached_table())
            module.listed = [torch.rand(5), torch.rand(9000), module.layer.weight]

        return Made(fill)

    _cached_table.cache_clear()
    real = build_for_real(build, seed=3)
    expected = _cached_table()
    _cached_table.cache_clear()
    module, source = open_model(build, seed=3)
    assert torch.equal(source.take(["table"])["table"], expected)
    assert torch.equal(_cached_table(), expected), "the next build of the class finds it in its cache"
    assert torch.equal(module.listed[0], real.listed[0])
    assert torch.equal(module.listed[1], real.listed[1])
    assert module.listed[2] is module.layer.weight
    _, again = open_model(build, seed=4)
    assert torch.equal(again.take(["table"])["table"], expected)


def test_a_given_module_is_copied_as_it_is_now() -> None:
    module = nn.Linear(4, 4)
    same, source = open_model(module, seed=0)
    assert same is module
    assert isinstance(source, ModuleValues)
    module.weight.data.fill_(2.0)
    taken = source.take(["weight"])["weight"]
    module.weight.data.fill_(3.0)
    assert torch.equal(taken, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("init", ["stream", "per_op"])
def test_a_meta_parameter_without_a_value_is_named(init: str) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_parameter("lost", nn.Parameter(torch.empty(100, 100, device="meta")))
        return module

    with pytest.raises(CaptureError, match=r"lost is on the meta device.*initialise it"):
        open_model(build, 0, Start(init))


def test_a_constructor_must_return_a_module() -> None:
    with pytest.raises(CaptureError, match=r"returned int; return a torch\.nn\.Module"):
        open_model(lambda: 3, seed=0)  # type: ignore[arg-type,return-value]


def test_wrapped_tensors_that_are_alive_elsewhere_do_not_spoil_a_recording() -> None:
    kept: list[Any] = []
    torch.vmap(lambda row: kept.append(row) or row + 1)(torch.ones(2, 3))
    kept.append(torch.eye(3).to_sparse())
    _, source = open_model(lambda: nn.Linear(80, 80), 0)
    assert "recorded" in source.note or "replayed" in source.note
    assert len(kept) == 2
