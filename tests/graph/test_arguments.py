"""However forward takes its tensors (by **kwargs, in dataclasses), their sizes stay symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.graph.capture.capture import capture


@dataclass
class Batch:
    rows: Tensor
    weights: Tensor
    power: int = 2


class Model(nn.Module):
    """One layer, with a weight per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def compute(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.layer(x) * weights  # type: ignore[no-any-return]


class Keywords(Model):
    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return self.compute(x, more["weights"])


class Anything(Model):
    def forward(self, *args: Any, **more: Any) -> Tensor:
        return self.compute(args[0], more["weights"])


class Dataclass(Model):
    def forward(self, batch: Batch) -> Tensor:
        return self.compute(batch.rows, batch.weights)


class Nested(Model):
    def forward(self, batches: dict[str, list[Batch]]) -> Tensor:
        return self.compute(batches["all"][0].rows, batches["all"][0].weights)


def rows() -> Tensor:
    return torch.randn(4, 6)


@pytest.mark.parametrize(
    ("model", "args", "kwargs"),
    [
        (Keywords(), (rows(),), {"weights": rows()}),
        (Keywords(), (), {"weights": rows(), "x": rows()}),
        (Anything(), (rows(),), {"weights": rows()}),
        (Dataclass(), (Batch(rows(), rows()),), {}),
        (Dataclass(), (), {"batch": Batch(rows(), rows())}),
        (Nested(), ({"all": [Batch(rows(), rows())]},), {}),
    ],
)
def test_the_number_of_rows_stays_open(model: nn.Module, args: Any, kwargs: Any) -> None:
    captured = capture(model, args, kwargs)
    shapes = [given.tensor.shape for given in captured.inputs if given.tensor is not None]
    batch = captured.symbols.symbols[0]
    assert batch.is_batch
    assert shapes == [(batch.name, 6), (batch.name, 6)]
