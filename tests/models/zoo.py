"""Models that are awkward to cut, each with the inputs of one chunk. Shared by the model tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hub
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagekit.examples import digits, gpt, gpt2


@dataclass(frozen=True)
class Case:
    """`build(dropout)` makes the model; `reference(dropout)` the same function made plainly, where that differs."""

    name: str
    build: Callable[[float], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    has_dropout: bool = False
    reference: Callable[[float], nn.Module] | None = None
    exact: bool = False  # bit-equality is promised: no tie over stages, no value with two uses inside a later stage


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


class Seq2Seq(nn.Module):
    """nn.Transformer between embeddings and a head: two inputs, masks made from a length."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, 16), nn.Embedding(50, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut, in place where it can be."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or width != out:
            self.down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += identity
        return self.relu(h)


class ResNet(nn.Module):
    """A small residual network with BatchNorm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(
            Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1)
        )
        self.drop = nn.Dropout2d(dropout)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.layers(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


class UNet(nn.Module):
    """Encoder and decoder with skips from every level to a much later stage."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()

        def block(width: int, out: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU(), nn.Dropout(dropout)
            )

        self.down1, self.down2, self.down3 = block(1, 8), block(8, 16), block(16, 16)
        self.middle = block(16, 16)
        self.up3 = nn.ConvTranspose2d(16, 16, 2, 2)
        self.up2 = nn.ConvTranspose2d(16, 8, 2, 2)
        self.dec3, self.dec2, self.dec1 = block(32, 16), block(32, 16), block(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.down3(F.avg_pool2d(second, 2))
        h = self.dec3(torch.cat([self.middle(third), third], 1))
        h = self.dec2(torch.cat([self.up3(h), second], 1))
        h = F.interpolate(self.up2(h), size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(self.dec1(torch.cat([h, first], 1)))


class LstmLanguageModel(nn.Module):
    """Embedding, a two-layer LSTM with dropout between the layers, a GRU, a head; returns its states too."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, 2, dropout=dropout, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h, (state, _) = self.lstm(self.embed(tokens))
        h, _ = self.gru(self.drop(h))
        return self.head(h), state.transpose(0, 1)


class TiedCounter(nn.Module):
    """A language model with tied embeddings, a buffer that counts its calls and a non-persistent table."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(x))) * self.table
        return self.head(x) * (1 + 0 * self.calls)


class AutocastRegion(nn.Module):
    """Autocast around the middle, with a part of full precision nested inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.layers[0](x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.drop(F.gelu(self.layers[1](h)))
            h = self.layers[2](h)
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(self.layers[3](h.float()))
            h = (self.layers[4](h) @ h.transpose(-1, -2)).softmax(-1) @ h
        return self.layers[5](h.float())


class NoGradRegion(nn.Module):
    """A teacher's features and running statistics are computed without gradient, in the middle of the model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.drop = nn.Dropout(dropout)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.layers[0](x)))
        with torch.no_grad():
            features = self.teacher(h)
            self.mean.mul_(0.9).add_(features.flatten(0, -2).mean(0), alpha=0.1)
            with torch.enable_grad():
                inner = torch.tanh(self.layers[1](features))
            scale = h.std() + 1
        h = self.layers[2](h / scale) + inner + features
        return self.layers[3](h - self.mean)


class Checkpointed(nn.Module):
    """Blocks with dropout under activation checkpointing; `checkpointed=False` is the same function without."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)) for _ in range(4)
        )
        self.checkpointed, self.reentrant = checkpointed, reentrant
        self.stem = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # reentrant checkpoints give no gradients where no input needs one
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x))
        return self.head(x)


class ClippedExp(torch.autograd.Function):
    """exp whose gradient is clipped: a backward of its own, which differs from that of the operations inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        ctx.limit = limit
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return grad * result.clamp(max=ctx.limit), None


class CustomFunction(nn.Module):
    """Uses an autograd.Function twice, with other layers around it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        h = ClippedExp.apply(h, 0.5)
        h = self.drop(self.layers[1](h))
        h = torch.tanh(self.layers[2](h))
        h = ClippedExp.apply(h, 1.0) + h
        return self.layers[3](h)


def _tokens(rows: int, length: int, limit: int) -> Tensor:
    return torch.randint(0, limit, (rows, length), generator=torch.Generator().manual_seed(1))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def listed() -> list[Case]:
    """Return the models that every change must train, dropout on and off; each row of inputs is one of the batch."""
    tokens = _tokens(4, 6, 40)
    wide = _floats(4, 5, 16)
    own = [
        Case("nn.Transformer", Seq2Seq, (_tokens(4, 7, 50), _tokens(4, 5, 50)), has_dropout=True),
        Case("resnet with BatchNorm", ResNet, (_floats(4, 3, 8, 8),), has_dropout=True),
        Case("unet with skips", UNet, (_floats(4, 1, 8, 8),), has_dropout=True),
        Case("lstm language model", LstmLanguageModel, (_tokens(4, 7, 50),), has_dropout=True),
        Case("tied with a counter", TiedCounter, (tokens,), has_dropout=True),
        Case("autocast region", AutocastRegion, (wide,), has_dropout=True),
        Case("no_grad region", NoGradRegion, (wide,), has_dropout=True),
        Case(
            "checkpointed blocks",
            Checkpointed,
            (wide,),
            has_dropout=True,
            reference=lambda p: Checkpointed(p, checkpointed=False),
        ),
        Case("custom autograd.Function", CustomFunction, (wide,), has_dropout=True),
    ]
    return [*(_from_hub(model) for model in hub.LISTED), *own]


def further() -> list[Case]:
    """Return models beyond the list: other architectures, and others of the same kind of trouble."""
    return [
        *(_from_hub(model) for model in hub.FURTHER),
        Case(
            "checkpointed blocks, reentrant",
            lambda p: Checkpointed(p, reentrant=True),
            (_floats(4, 5, 16),),
            has_dropout=True,
            reference=lambda p: Checkpointed(p, checkpointed=False),
        ),
    ]


def _from_hub(model: hub.HubModel) -> Case:
    return Case(model.name, model.build, (), model.inputs(), has_dropout=bool(model.rates))


def awkward() -> list[Case]:
    """Return small models without randomness, each awkward to cut in a way of its own."""
    small = gpt.Program(layers=2, width=32, sequence=16)
    network = digits.Program(width=4)
    tied = gpt2.Program(width=32, sequence=16)
    inside = gpt2.Program(width=32, sequence=16, loss_inside=True)
    tokens = _tokens(4, 16, 256)
    return [
        Case("gpt", lambda _: small.build_model(), (tokens,), exact=True),
        Case("digits", lambda _: network.build_model(), (_floats(6, 1, 8, 8),), exact=True),
        Case("gpt2 program", lambda _: tied.build_model(), (), {"input_ids": tokens}),
        Case("gpt2 with its loss", lambda _: inside.build_model(), (), {"input_ids": tokens, "labels": tokens}),
        Case("skip connections", lambda _: SkipNet(), (_floats(6, 16), torch.ones(16))),
        Case("lstm", lambda _: LstmTagger(), (_tokens(4, 7, 50),)),
        Case("tied", lambda _: TiedCounter(), (_tokens(4, 6, 40),)),
        Case("dict output", lambda _: DictOutput(), (_floats(6, 8),)),
        Case("in-place writes and regions", lambda _: InPlaceAndRegions(), (_floats(6, 8),)),
        Case(
            "transformer encoder",
            lambda _: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3),
            (_floats(4, 5, 16),),
        ),
    ]
