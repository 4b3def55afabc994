"""Models that are awkward to cut, each with the inputs of one chunk. Shared by the model tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.examples import digits, gpt, gpt2


@dataclass(frozen=True)
class Case:
    """`exact`: bit-equality is promised (no tie over stages, no value with two uses inside a later stage)."""

    name: str
    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    exact: bool = False


class SkipNet(nn.Module):
    """A value of the first layer is read by every later one; a mask and an integer cross the cuts too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.unused = nn.Linear(16, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.enter(x)
        keep = first.detach() > 0
        order = first.argsort(-1)
        h = torch.tanh(first)
        for layer in self.layers:
            h = torch.relu(layer(h)) + first
        h = torch.where(keep, h, h * 0.5).gather(1, order)
        return h * mask


class LstmTagger(nn.Module):
    """Embedding, two LSTMs, a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.first = nn.LSTM(16, 16, batch_first=True)
        self.second = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y, _ = self.first(x)
        z, (last, _) = self.second(y)
        return self.head(z + y) + last.transpose(0, 1).mean()


class TiedCounter(nn.Module):
    """A language model with tied embeddings and a buffer that counts its calls and takes part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * self.table
        return self.head(x) * (1 + 0 * self.calls)


class DictOutput(nn.Module):
    """Returns hidden states made before the last stage, an input as it came, None and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Any]:
        hidden = []
        h = x
        for layer in self.layers:
            h = torch.relu_(layer(h)).view(-1, 2, 4).flatten(1)
            hidden.append(h)
        return {"out": h * scale, "hidden": tuple(hidden[:2]), "input": x, "nothing": None, "scale": scale}


class InPlaceAndRegions(nn.Module):
    """Writes into slices and into its input, with no_grad and autocast regions in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2.0)
        h = self.a(x)
        with torch.no_grad():
            scale = h.abs().mean() + self.frozen(x).mean()
        filled = torch.zeros_like(h)
        filled[:, :4] = h[:, 4:]
        filled[:, 4:] = h[:, :4] * scale
        h = self.b(filled)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.c(h)
        return h + low.float().expand(3, -1, -1).transpose(0, 1).sum(1)


class Dropout(nn.Module):
    """Dropout between layers and inside attention."""

    def __init__(self, p: float = 0.3, layers: int = 4) -> None:
        super().__init__()
        self.p = p
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.relu(layer(x)), self.p, self.training)
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return x


def _tokens(rows: int, length: int, limit: int) -> Tensor:
    return torch.randint(0, limit, (rows, length), generator=torch.Generator().manual_seed(1))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def cases() -> list[Case]:
    """Return every model without randomness in its forward."""
    small = gpt.Program(layers=2, width=32, sequence=16)
    network = digits.Program(width=4)
    tied = gpt2.Program(width=32, sequence=16)
    inside = gpt2.Program(width=32, sequence=16, loss_inside=True)
    tokens = _tokens(4, 16, 256)
    return [
        Case("gpt", small.build_model, (tokens,), exact=True),
        Case("digits", network.build_model, (_floats(6, 1, 8, 8),), exact=True),
        Case("gpt2", tied.build_model, (), {"input_ids": tokens}),
        Case("gpt2 with its loss", inside.build_model, (), {"input_ids": tokens, "labels": tokens}),
        Case("skip connections", SkipNet, (_floats(6, 16), torch.ones(16))),
        Case("lstm", LstmTagger, (_tokens(4, 7, 50),)),
        Case("tied with a counter", TiedCounter, (_tokens(4, 6, 40),)),
        Case("dict output", DictOutput, (_floats(6, 8),)),
        Case("in-place writes and regions", InPlaceAndRegions, (_floats(6, 8),)),
        Case(
            "transformer encoder",
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3),
            (_floats(4, 5, 16),),
        ),
    ]
