"""Real text that every Python installation has: the language reference in pydoc, as bytes. Used by gpt and gpt2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from stagekit.rows import chunk_rows, share_of

__all__ = ["VOCABULARY", "chunk_rows", "corpus", "crops", "share_of"]

VOCABULARY = 256  # bytes


@functools.cache
def corpus() -> Tensor:
    """Return the text as one uint8 tensor, topics in alphabetical order."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def crops(
    *, rows: int, length: int, seed: int, start_step: int, replica: int, replicas: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, next tokens), each int64 [share of rows, length], of step `start_step` and all after it.

    Drawn from (seed, step) alone: resuming at a step repeats it, and replicas share one batch.
    """
    text = corpus()
    mine = share_of(rows, replica, replicas)
    step = start_step
    while True:
        begins = np.random.default_rng((seed, step)).integers(0, len(text) - length - 1, rows)[mine]
        window = torch.stack([text[int(b) : int(b) + length + 1] for b in begins]).long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
        step += 1
