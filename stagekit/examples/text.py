"""Real text that every Python installation has: the language reference in pydoc, as bytes. Used by gpt and gpt2."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from stagekit.errors import UserError

VOCABULARY = 256  # bytes


@functools.cache
def corpus() -> Tensor:
    """Return the text as one uint8 tensor, topics in alphabetical order."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def share_of(rows: int, replica: int, replicas: int) -> slice:
    """Return the rows of a batch that `replica` takes; the first ones take one more where it does not divide."""
    if not 0 <= replica < replicas:
        raise UserError(f"replica {replica} of {replicas}: it must be below the number of replicas")
    if rows < replicas:
        raise UserError(f"a batch of {rows} rows can't be shared by {replicas} replicas; use a larger batch")
    each, more = divmod(rows, replicas)
    begin = replica * each + min(replica, more)
    return slice(begin, begin + each + (replica < more))


def chunk_rows(rows: int, chunks: int, replicas: int) -> int:
    """Return the rows of one chunk of one replica."""
    return max(1, rows // replicas // chunks)


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
