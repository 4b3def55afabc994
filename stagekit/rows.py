"""Rows of a batch: which of them a replica takes, how many a chunk has. Used by programs that draw whole batches."""

from __future__ import annotations

from stagekit.errors import UserError


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
