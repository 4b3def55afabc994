"""A forward job: embeds text with a GPT, as `program: stagekit.examples.embed:Program` with `pipeline.schedule: forward`.

`weights:` names what stagekit.examples.gpt trained, with the same `layers`, `width`, `heads` and `sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagekit.examples.gpt import GPT
from stagekit.examples.text import chunk_rows, corpus
from stagekit.program import Batch, ProgramDefaults


class Embedder(GPT):
    """Tokens int64 [rows, length] → the mean of the last hidden states, float32 [rows, width]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one vector per row."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)  # type: ignore[no-any-return]


class Program(ProgramDefaults):
    """Embeds the first `num_windows` windows of the text; replica r writes every `replicas`-th to `<output>.<r>.f32`.

    `numpy.fromfile(file, "float32").reshape(-1, width)` reads it.
    """

    mode = "forward"

    def __init__(
        self,
        *,
        output: str,
        num_windows: int = 1000,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        sequence: int = 128,
        batch: int = 32,
    ) -> None:
        self.output, self.num_windows = Path(output), num_windows
        self.layers, self.width, self.heads, self.sequence, self.batch = layers, width, heads, sequence, batch

    def build_model(self) -> nn.Module:
        """Return the model."""
        return Embedder(self.layers, self.width, self.heads, self.sequence, dropout=0.0)

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tokens of one chunk."""
        rows = chunk_rows(self.batch, self.chunks, self.replicas)
        return (torch.zeros(rows, self.sequence, dtype=torch.int64),), {}

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield this replica's windows in their order; the last batch is smaller, or larger by less than a row a chunk."""
        windows = corpus()[: self.num_windows * self.sequence].view(-1, self.sequence)[replica::replicas].long()
        pieces = list(windows.split(self.batch // replicas))
        if len(pieces) > 1 and len(pieces[-1]) < self.chunks:  # each chunk needs a row
            pieces[-2:] = [torch.cat(pieces[-2:])]
        for tokens in pieces[start_step:]:
            yield Batch((tokens,))

    def collect(self, outputs: Tensor) -> None:
        """Append the vectors of a batch."""
        with Path(f"{self.output}.{self.replica}.f32").open("ab") as file:
            file.write(outputs.contiguous().numpy().tobytes())
