"""GPT-2 from transformers, small, byte-level, with tied embeddings: a model class that knows nothing of pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.examples.text import VOCABULARY, chunk_rows, crops
from stagekit.program import Batch, ProgramDefaults


class Program(ProgramDefaults):
    """Trains GPT2LMHeadModel. `loss_inside`: labels go in and the model computes the loss itself."""

    def __init__(
        self,
        *,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        sequence: int = 64,
        batch: int = 16,
        lr: float = 1e-3,
        dropout: float = 0.0,
        loss_inside: bool = False,
        seed: int = 0,
    ) -> None:
        self.layers, self.width, self.heads, self.sequence = layers, width, heads, sequence
        self.batch, self.lr, self.dropout, self.loss_inside, self.seed = batch, lr, dropout, loss_inside, seed

    def build_model(self) -> nn.Module:
        """Return the model from a config: no download."""
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.sequence,
            vocab_size=VOCABULARY,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            use_cache=False,
        )
        model: nn.Module = GPT2LMHeadModel(config)
        return model.train()

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tokens of one chunk, and labels where the model computes the loss."""
        tokens = torch.zeros(chunk_rows(self.batch, self.chunks, self.replicas), self.sequence, dtype=torch.int64)
        return (), {"input_ids": tokens, **({"labels": tokens.clone()} if self.loss_inside else {})}

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean cross entropy per byte, in nats."""
        if self.loss_inside:
            return output.loss  # type: ignore[no-any-return]
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self.lr, weight_decay=0.01)

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield random crops; labels are the tokens themselves where the model shifts them."""
        for tokens, following in crops(
            rows=self.batch,
            length=self.sequence,
            seed=self.seed,
            start_step=start_step,
            replica=replica,
            replicas=replicas,
        ):
            if self.loss_inside:
                yield Batch((), {"input_ids": tokens, "labels": tokens}, tokens)
            else:
                yield Batch((), {"input_ids": tokens}, following)
