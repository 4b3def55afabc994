"""A model may keep tables in caches outside of it: a capture leaves no tensor without values there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import capture

TABLES: dict[Any, Any] = {}
LAST: Tensor | None = None


@functools.lru_cache(None)
def window(size: int) -> Tensor:
    return torch.hann_window(size)


@functools.lru_cache(4)
def windows(size: int) -> tuple[Tensor, Tensor]:
    return torch.hann_window(size), torch.ones(size)


class Rotary:
    known: ClassVar[dict[str, dict[int, Tensor]]] = {"tables": {}}

    @staticmethod
    @functools.lru_cache(4)
    def angles(size: int) -> Tensor:
        return torch.arange(size).float()

    @classmethod
    def table(cls, size: int) -> Tensor:
        if size not in cls.known["tables"]:
            cls.known["tables"][size] = cls.angles(size)
        return cls.known["tables"][size]


def in_a_dict(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.arange(size).float()
    return TABLES[size]  # type: ignore[no-any-return]


def in_a_variable(size: int) -> Tensor:
    global LAST
    if LAST is None:
        LAST = torch.arange(size).float()
    return LAST


class Model(nn.Module):
    def __init__(self, table: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.table = nn.Linear(6, 6), nn.Linear(6, 6), table

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.table(x.shape[1]))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def empty() -> None:
    global LAST
    LAST = None
    for cache in (window, windows, Rotary.angles):
        cache.cache_clear()
    TABLES.clear()
    Rotary.known["tables"].clear()


@pytest.mark.parametrize("structural", [False, True])
@pytest.mark.parametrize(
    "table", [window, lambda size: windows(size)[1], Rotary.table, in_a_dict, in_a_variable], ids=range(5)
)
def test_a_model_computes_after_a_capture_what_it_computed_before(
    table: Any, structural: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if structural:  # as for a model whose copies do not fit into memory
        monkeypatch.setattr("os.sysconf", lambda _: 1)
    model, x = Model(table), torch.randn(4, 6)
    captured = capture(model, (x,))
    assert captured.self_check == ("structural" if structural else "values")
    torch.testing.assert_close(model(x), model.b(model.a(x) * table(6)))
    assert type(model(x)) is Tensor


def test_tables_that_the_user_made_before_stay() -> None:
    x, mine = torch.randn(4, 6), torch.ones(6)
    TABLES[6] = mine
    capture(Model(in_a_dict), (x,))
    assert list(TABLES) == [6] and TABLES[6] is mine


def test_a_list_that_a_capture_filled_is_told_in_words() -> None:
    kept: list[Tensor] = []

    def in_a_list(size: int) -> Tensor:
        if not kept:
            kept.append(torch.arange(size).float())
        return kept[0]

    with pytest.raises(CaptureError, match=r"keeps tensors outside of the model .* make them buffers"):
        capture(Model(in_a_list), (torch.randn(4, 6),))
