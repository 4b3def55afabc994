"""Part buckets around operations that no compiler may touch: they run eagerly between compiled pieces.

What they are is for the caller to say: random operations without a functional form, a user's own autograd.Functions.
Used by graph.bucket alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive nodes of one bucket, compiled together or not at all."""

    nodes: tuple[fx.Node, ...]
    is_eager: bool


def pieces_of(
    nodes: Sequence[fx.Node],
    legal: Collection[int],
    groups: Sequence[Sequence[fx.Node]],
    runs_eagerly: Callable[[fx.Node], bool],
) -> list[Piece]:
    """Return the pieces of all groups, in order; `legal` are the positions in `nodes` where a piece may begin.

    What lies between two legal positions stays together: a region with such an operation runs eagerly as a whole.
    """
    begins = {group[0] for group in groups}
    pieces: list[Piece] = []
    atom: list[fx.Node] = []
    starts = True
    for position, node in enumerate(nodes):
        atom.append(node)
        if position + 1 in legal or position + 1 == len(nodes):
            is_eager = any(map(runs_eagerly, atom))
            if pieces and not starts and pieces[-1].is_eager == is_eager:
                pieces[-1] = Piece((*pieces[-1].nodes, *atom), is_eager)
            else:
                pieces.append(Piece(tuple(atom), is_eager))
            atom = []
            starts = position + 1 < len(nodes) and nodes[position + 1] in begins
    return _without_unread(pieces)


def _without_unread(pieces: Sequence[Piece]) -> list[Piece]:
    """Join each piece whose values nobody else reads with the next one, which keeps what it does in order."""
    result: list[Piece] = []
    for piece in pieces:
        if result and not _is_read(result[-1]):
            last = result.pop()
            piece = Piece((*last.nodes, *piece.nodes), last.is_eager or piece.is_eager)
        result.append(piece)
    return result


def _is_read(piece: Piece) -> bool:
    inside = set(piece.nodes)
    return any(user not in inside for node in piece.nodes for user in node.users)
