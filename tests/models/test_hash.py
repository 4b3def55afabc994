"""The graph hash is the same in every process and differs as soon as anything of the model differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from stagekit.graph.capture.capture import capture
from stagekit.graph.capture.fingerprint import graph_hash


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return 2 * ctx.factor * grad, None


class Model(nn.Module):
    """Has constants of every kind: an argument, a tensor made in forward, one of a custom Function's."""

    def __init__(self, width: int = 8, power: float = 2.0, table: float = 1.0, factor: float = 3.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        self.power, self.table, self.factor = power, table, factor

    def forward(self, x: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
        h = self.first(x).pow(self.power) * torch.tensor([self.table])
        h = Scaled.apply(h, self.factor)
        return {name: self.second(h) * value for name, value in options.items()}


def inputs() -> tuple[Any, ...]:
    return torch.ones(3, 4), {"a": torch.ones(3, 1), "b": torch.ones(3, 1)}


def hash_of(model: nn.Module, **more: Any) -> str:
    return capture(model, inputs(), check=False, **more).graph_hash


def test_the_hash_is_equal_in_other_processes_whatever_their_hash_seed() -> None:
    code = "from test_hash import *; print(hash_of(Model()))"
    here = Path(__file__).parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=here,
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    hashes = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert len(hashes[0]) == 32
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("change", [{"width": 12}, {"power": 3.0}, {"table": 2.0}, {"factor": 4.0}])
def test_another_configuration_has_another_hash(change: dict[str, Any]) -> None:
    assert hash_of(Model(**change)) != hash_of(Model())


def test_another_dtype_or_mode_or_frozen_parameter_has_another_hash() -> None:
    plain = hash_of(Model())
    frozen = Model()
    frozen.second.bias.requires_grad_(False)
    halved = capture(Model().bfloat16(), (inputs()[0].bfloat16(), inputs()[1]), check=False).graph_hash
    hashes = {plain, halved, hash_of(frozen), hash_of(Model(), training=False)}
    assert len(hashes) == 4


class Options:
    """What a custom Function may be given beside tensors and numbers."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.names = {"factor", "names"}


class Configured(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Options) -> Tensor:
        return x * options.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class WithAttributes(nn.Module):
    """A table that is no buffer, and an object that a custom Function gets."""

    def __init__(self, table: float = 1.0, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.table, self.options = nn.Linear(4, 4), torch.tensor([table] * 4), Options(factor)

    def forward(self, x: Tensor) -> Tensor:
        return Configured.apply(self.layer(x) * self.table, self.options)  # type: ignore[no-any-return]


def test_values_in_plain_attributes_and_in_objects_given_to_functions_count() -> None:
    def hash_with(**values: float) -> str:
        return capture(lambda: WithAttributes(**values), (torch.ones(3, 4),), check=False).graph_hash

    assert hash_with() == hash_with()
    assert len({hash_with(), hash_with(table=2.0), hash_with(factor=2.0)}) == 3
    assert capture(WithAttributes(), (torch.ones(3, 4),), check=False).graph_hash == hash_with()


def test_the_versions_of_the_models_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Model(), inputs(), check=False).graph
    sources = ["hypothesis.nothing"]
    before = graph_hash(graph, (), {}, sources)
    import hypothesis

    monkeypatch.setattr(hypothesis, "__version__", "0")
    assert graph_hash(graph, (), {}, sources) != before
