"""A byte-level GPT on real text: the program of the quick start. `program: stagekit.examples.gpt:Program`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.errors import UserError
from stagekit.examples.text import VOCABULARY, chunk_rows, crops
from stagekit.program import Batch, ProgramDefaults


class Block(nn.Module):
    """Pre-norm attention and MLP on [rows, length, width].

    First each place mixes in its left neighbour (the token shift of RWKV, arXiv:2305.13048): on bytes it halves the
    steps to a given loss.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.mix = nn.Parameter(torch.full((width,), 0.3))
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, width]."""
        rows, length, width = x.shape
        x = x + self.mix * F.pad(x, (0, 0, 1, -1))
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        mlp = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + F.dropout(mlp, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens int64 [rows, length] → logits [rows, length, 256]."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # residual branches start small (GPT-2)
            nn.init.normal_(block.proj.weight, std=0.02 / (2 * layers) ** 0.5)  # type: ignore[union-attr, arg-type]
            nn.init.normal_(block.down.weight, std=0.02 / (2 * layers) ** 0.5)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Program(ProgramDefaults):
    """Trains GPT on random crops. `batch` is a step's rows over all replicas; `seed` chooses the crops."""

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        sequence: int = 128,
        batch: int = 32,
        lr: float = 3e-3,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        if width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads; choose a multiple")
        self.layers, self.width, self.heads, self.sequence = layers, width, heads, sequence
        self.batch, self.lr, self.dropout, self.seed = batch, lr, dropout, seed

    def build_model(self) -> nn.Module:
        """Return the model with its initial weights."""
        return GPT(self.layers, self.width, self.heads, self.sequence, self.dropout)

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tokens of one chunk."""
        rows = chunk_rows(self.batch, self.chunks, self.replicas)
        return (torch.zeros(rows, self.sequence, dtype=torch.int64),), {}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy per byte, in nats."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return AdamW; only matrices decay."""
        parameters = [parameter for _, parameter in named_parameters]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, betas=(0.9, 0.95))

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield random crops and the bytes that follow."""
        for tokens, target in crops(
            rows=self.batch,
            length=self.sequence,
            seed=self.seed,
            start_step=start_step,
            replica=replica,
            replicas=replicas,
        ):
            yield Batch((tokens,), {}, target)
