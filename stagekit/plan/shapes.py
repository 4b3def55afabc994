"""Sizes: evaluate the shape expressions of the stage contract, and cut a batch into chunk sizes. Pure."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from stagekit.errors import BugError, ShapeError
from stagekit.plan.contract import Dim

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
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
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "floor": math.floor,
    "CeilDiv": lambda a, b: -(-a // b),
    "max": max,
    "min": min,
    "abs": abs,
    "float": float,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}
_CONSTANTS = {"math.inf": math.inf}


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Return the size that `dim` is for these symbol values. Raises BugError for an expression of another form."""
    if isinstance(dim, int):
        return dim
    if dim in symbols:
        return symbols[dim]
    return int(_walk(ast.parse(dim, mode="eval").body, symbols, dim))


def holds(guard: str, symbols: Mapping[str, int]) -> bool:
    """Tell whether a condition like "s0 % 2 == 0" holds for these sizes; what divides by zero does not.

    Raises BugError for a condition of another form, or over a size that is not known here.
    """
    try:
        return bool(_walk(ast.parse(guard, mode="eval").body, symbols, guard))
    except ZeroDivisionError:
        return False


def _walk(node: ast.AST, symbols: Mapping[str, int], text: str) -> Any:
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in symbols:
            return symbols[node.id]
        case ast.Attribute() if ast.unparse(node) in _CONSTANTS:
            return _CONSTANTS[ast.unparse(node)]
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_walk(node.left, symbols, text), _walk(node.right, symbols, text))
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_walk(node.operand, symbols, text))
        case ast.Compare(ops=[compared], comparators=[right]) if type(compared) in _COMPARISONS:
            return _COMPARISONS[type(compared)](_walk(node.left, symbols, text), _walk(right, symbols, text))
        case ast.BoolOp():
            parts = [_walk(part, symbols, text) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.IfExp():
            return _walk(node.body if _walk(node.test, symbols, text) else node.orelse, symbols, text)
        case ast.Call(keywords=[]) if ast.unparse(node.func) in _FUNCTIONS:
            return _FUNCTIONS[ast.unparse(node.func)](*(_walk(argument, symbols, text) for argument in node.args))
        case _:
            raise BugError(f"shape expression {text!r}: {ast.dump(node)} is unknown; known symbols: {sorted(symbols)}")


def chunk_sizes(rows: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rows of each chunk: they differ by at most one, larger ones first, as torch.tensor_split does.

    Raises ShapeError for fewer rows than chunks: a chunk is never empty.
    """
    if rows == 0:
        raise ShapeError(f"a batch of 0 rows: there is nothing to compute; give at least {num_chunks}, one per chunk")
    if rows < num_chunks:
        raise ShapeError(f"a batch of {rows} rows can't be split into {num_chunks} chunks; use at most {rows} chunks")
    full, extra = divmod(rows, num_chunks)
    return (full + 1,) * extra + (full,) * (num_chunks - extra)
