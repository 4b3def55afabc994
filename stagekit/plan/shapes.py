"""Sizes: evaluate the shape expressions of the stage contract, and cut a batch into chunk sizes. Pure."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from stagekit.errors import BugError, ShapeError
from stagekit.plan.contract import Dim

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARISONS: dict[type[ast.AST], Callable[..., bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "floor": lambda x: int(x // 1),
    "CeilDiv": lambda a, b: -(-a // b),
}


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Return the size that `dim` is for these symbol values. Raises BugError for an expression of another form."""
    if isinstance(dim, int):
        return dim
    if dim in symbols:
        return symbols[dim]
    return int(_walk(ast.parse(dim, mode="eval").body, symbols, dim))


def holds(guard: str, symbols: Mapping[str, int]) -> bool:
    """Tell whether a condition like "s0 % 2 == 0" holds; one over a symbol that is not known here is not decided."""
    tree = ast.parse(guard, mode="eval").body
    if any(isinstance(node, ast.Name) and node.id not in {*symbols, *_FUNCTIONS} for node in ast.walk(tree)):
        return True
    return bool(_walk(tree, symbols, guard))


def _walk(node: ast.AST, symbols: Mapping[str, int], text: str) -> Any:
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.Name() if node.id in symbols:
            return symbols[node.id]
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_walk(node.left, symbols, text), _walk(node.right, symbols, text))
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_walk(node.operand, symbols, text))
        case ast.Compare(ops=[compared], comparators=[right]) if type(compared) in _COMPARISONS:
            return _COMPARISONS[type(compared)](_walk(node.left, symbols, text), _walk(right, symbols, text))
        case ast.BoolOp():
            parts = [_walk(part, symbols, text) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_walk(argument, symbols, text) for argument in node.args))
        case _:
            raise BugError(f"shape expression {text!r}: {ast.dump(node)} is unknown; known symbols: {sorted(symbols)}")


def chunk_sizes(rows: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rows of each chunk: they differ by at most one, larger ones first, as torch.tensor_split does.

    Raises ShapeError for fewer rows than chunks: a chunk is never empty.
    """
    if rows < num_chunks:
        raise ShapeError(f"a batch of {rows} rows can't be split into {num_chunks} chunks; use at most {rows} chunks")
    full, extra = divmod(rows, num_chunks)
    return (full + 1,) * extra + (full,) * (num_chunks - extra)
