"""Sizes that differ between chunks: the names we give them, and tensors described over those names.

Export calls a size s77; a `SymbolTable` calls it s0, by order of appearance over the graph inputs, so that two
processes agree. Called by graph.capture, graph.cut and graph.cut.stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.printers import PythonPrinter

from stagekit.errors import BugError, CaptureError
from stagekit.plan.contract import Dim, GraphInput, Symbol, TensorSpec
from stagekit.plan.shapes import evaluate, holds


@dataclass(frozen=True)
class SymbolTable:
    """Export's symbols → ours, and the example size of each."""

    names: Mapping[sympy.Symbol, str]
    symbols: tuple[Symbol, ...]

    def with_minimum(self, minimum: Mapping[str, int]) -> SymbolTable:
        """Return the same table with other smallest sizes, by our names."""
        changed = (replace(symbol, minimum=minimum[symbol.name]) for symbol in self.symbols)
        return SymbolTable(self.names, tuple(changed))

    def with_maximum(self, maximum: Mapping[str, int]) -> SymbolTable:
        """Return the same table with other largest sizes where they are smaller, by our names."""
        changed = []
        for symbol in self.symbols:
            limits = [limit for limit in (symbol.maximum, maximum.get(symbol.name)) if limit is not None]
            changed.append(replace(symbol, maximum=min(limits)) if limits else symbol)
        return SymbolTable(self.names, tuple(changed))

    def with_batch(self, given: int, chunks: int) -> SymbolTable:
        """Return the same table where the example is one of `chunks` chunks of the batch of which it is one of `given`."""
        changed = (
            replace(symbol, example=symbol.example * given // chunks) if symbol.is_batch else symbol
            for symbol in self.symbols
        )
        return SymbolTable(self.names, tuple(changed))

    def dim(self, size: Any) -> Dim:
        """Return a size of a fake tensor as an int or an expression over our names."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr.is_number:
            return int(expr)
        self.check_known(expr)
        expr = _without_min_max(expr)
        if expr.is_number:
            return int(expr)
        text = self._written(expr)
        self._check_size(size, text)
        return text

    def guards(self, conditions: Iterable[sympy.Basic]) -> tuple[str, ...]:
        """Return conditions over export's symbols as Python over ours; those over other symbols hold for every chunk."""
        known = [c for c in conditions if c.free_symbols and c.free_symbols <= set(self.names)]
        texts = tuple(dict.fromkeys(self._written(c) for c in known if c != sympy.true))
        for text in texts:
            self._check_form(text, lambda text: holds(text, self._examples()))
        return texts

    def told(self, number: Any, inputs: Sequence[GraphInput]) -> str:
        """Return a symbolic number in the user's words: "args[0].shape[1] * 2"."""
        shown = {s.name: sympy.Symbol(f"{inputs[s.graph_input].name}.shape[{s.dim}]") for s in self.symbols}
        return str(number.node.expr.xreplace({old: shown[new] for old, new in self.names.items()}))

    def _written(self, expr: sympy.Basic) -> str:
        """Return an expression over export's symbols as Python over ours."""
        named = {old: sympy.Symbol(new, integer=True, positive=True) for old, new in self.names.items()}
        try:
            return str(_Printer().doprint(expr.xreplace(named)))
        except Exception as error:
            raise _unreadable(str(expr)) from error

    def _examples(self) -> dict[str, int]:
        return {symbol.name: symbol.example for symbol in self.symbols}

    def _check_form(self, text: str, evaluated: Callable[[str], Any]) -> Any:
        """Refuse now what no step could evaluate."""
        try:
            return evaluated(text)
        except ZeroDivisionError:  # the example is outside what the expression is for; a step's sizes need not be
            return None
        except BugError as error:
            raise _unreadable(text) from error

    def _check_size(self, size: Any, text: str) -> None:
        """Refuse an expression that, as written, is another size than the example's."""
        here = self._check_form(text, lambda text: evaluate(text, self._examples()))
        value = size.node.expr.xreplace({old: sympy.Integer(self._examples()[new]) for old, new in self.names.items()})
        if here is not None and value.is_number and int(value) != here:
            raise _unreadable(text)

    def example(self, size: Any) -> Any:
        """Return the value that a symbolic size, float or bool has in the example."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        by_name = self._examples()
        value = size.node.expr.xreplace({old: sympy.Integer(by_name[new]) for old, new in self.names.items()})
        if isinstance(size, torch.SymBool):
            return bool(value)
        return int(value) if isinstance(size, torch.SymInt) else float(value)

    def check_known(self, expr: sympy.Basic, where: str = "") -> None:
        """Refuse a number that depends on values instead of on the inputs' shapes; `where` is the user's line."""
        unknown = [s for s in expr.free_symbols if s not in self.names]
        if unknown:
            raise CaptureError(
                f"a size or number in the model depends on data{where}, not on the inputs' shapes: values read with "
                ".item() or .tolist(), a size from torch.div, or a selection like x[x > 0]; a pipeline needs them before a "
                "chunk runs: keep values in tensors, compute sizes with Python's //, pad or mask instead of selecting"
            )

    def spec(self, tensor: Tensor, *, requires_grad: bool | None = None) -> TensorSpec:
        """Describe a fake tensor of the capture for one chunk."""
        return TensorSpec(
            shape=tuple(self.dim(size) for size in tensor.size()),
            stride=tuple(self.dim(step) for step in tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad if requires_grad is None else requires_grad,
        )

    def example_shape(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return size and stride of a fake tensor at the example's sizes."""
        return tuple(self.example(s) for s in tensor.size()), tuple(self.example(s) for s in tensor.stride())


class _Printer(PythonPrinter):
    """Writes what stagekit.plan.shapes evaluates: plain Python, floats in full."""

    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_Float(self, expr: sympy.Expr) -> str:
        return repr(float(expr))

    def _print_OpaqueUnaryFn_sqrt(self, expr: sympy.Expr) -> str:
        return f"math.sqrt({self._print(expr.args[0])})"


def _unreadable(text: str) -> CaptureError:
    return CaptureError(
        f"the model computes a size or a condition on sizes, {text}, that a step can't work out for other sizes than the "
        "example's; compute it with +, -, *, /, //, %, min, max, round, floor and ceil, or pass it as an argument"
    )


def _without_min_max(expr: sympy.Expr) -> sympy.Expr:
    """Decide Min and Max by the fact that every size is at least 1: min(64, 64*s) is 64."""
    if not expr.has(Min, Max):
        return expr
    above_one = {s: sympy.Symbol(f"{s.name}_less_1", integer=True, nonnegative=True) for s in expr.free_symbols}
    shifted = expr.replace(Min, sympy.Min).replace(Max, sympy.Max)
    shifted = shifted.xreplace({s: t + 1 for s, t in above_one.items()}).expand()
    return shifted.doit().xreplace({t: s - 1 for s, t in above_one.items()}).expand()


def symbol_table(
    fakes: list[Any], examples: list[Any], split_dims: list[int | None], ranges: Mapping[sympy.Symbol, Any]
) -> SymbolTable:
    """Name the symbols found in the fake graph inputs, in order of appearance.

    Raises CaptureError if an input's size is an expression that no input shows as a plain symbol.
    """
    names: dict[sympy.Symbol, str] = {}
    found: dict[str, dict[str, Any]] = {}
    for index, fake in enumerate(fakes):
        for dim, size in enumerate(_sizes(fake)):
            if isinstance(size, int) or not isinstance(size.node.expr, sympy.Symbol):
                continue
            symbol, is_batch = size.node.expr, split_dims[index] == dim
            if symbol not in names:
                names[symbol] = f"s{len(names)}"
                low, high = _bounds(ranges.get(symbol))
                found[names[symbol]] = {
                    "name": names[symbol],
                    "example": int(examples[index].size(dim)),
                    "minimum": low,
                    "maximum": high,
                    "graph_input": index,
                    "dim": dim,
                    "is_batch": is_batch,
                }
            elif is_batch:
                found[names[symbol]]["is_batch"] = True
    table = SymbolTable(names, tuple(Symbol(**fields) for fields in found.values()))
    for fake in fakes:
        for size in _sizes(fake):
            table.dim(size)
    return table


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.size()) if isinstance(value, Tensor) else ()


def _bounds(value_range: Any) -> tuple[int, int | None]:
    """Return a symbol's bounds. Export's lower bound 2 only says that it did not specialise on 0 and 1; 1 is exact."""
    if value_range is None:
        return 1, None
    low = int(value_range.lower) if value_range.lower.is_number and value_range.lower.is_finite else 1
    high = int(value_range.upper) if value_range.upper.is_Integer else None
    if high is not None and high >= 2**62:
        high = None
    return (1 if low <= 2 else low), high
