"""For which sizes `reshape`, `flatten`, `contiguous` and `to` copy or share memory as they did at the example's.

Whether they copy depends on sizes, and matters where one of two such tensors is written in place while the other is still
read. `layout_conditions` tries those operations at other sizes and returns conditions for the plan, which are checked before a
chunk runs. Called by graph.capture before graph.passes.aliasing makes writes functional.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from stagekit.graph.passes.aliasing import schema_name, storage_number, written_inputs

_MAY_COPY = tuple(f"aten::{name}" for name in ("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"))
_SMALL = range(
    1, 17
)  # sizes that are tried of each symbol, besides the example's neighbourhood and those that conditions name
_MOST = 4096  # trials of one operation

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class _Memory:
    """The graph's order, and which nodes would share memory if no operation copied."""

    order: Mapping[fx.Node, int]
    family: Mapping[fx.Node, int]
    kept: frozenset[int]  # families of parameters, buffers and constants
    writes: Sequence[tuple[fx.Node, fx.Node]]  # (writer, what it writes)


def layout_conditions(graph: fx.Graph, storage_of: Mapping[str, int], kept: frozenset[int]) -> list[sympy.Basic]:
    """Return conditions over export's symbols under which written memory is shared as at the example's sizes.

    `kept`: storages of parameters, buffers and constants, which the next forward reads.
    """
    choices = [node for node in graph.nodes if schema_name(node) in _MAY_COPY and isinstance(node.args[0], fx.Node)]
    choices = [node for node in choices if isinstance(node.meta.get("val"), Tensor) and _symbols(node)]
    writes = [(node, target) for node in graph.nodes for target in written_inputs(node)] if choices else []
    if not writes:
        return []
    memory = _memory(graph, storage_of, kept, choices, writes)
    return [condition for node in choices if _matters(node, memory) for condition in _conditions(node)]


def _memory(
    graph: fx.Graph,
    storage_of: Mapping[str, int],
    kept: frozenset[int],
    choices: Sequence[fx.Node],
    writes: Sequence[tuple[fx.Node, fx.Node]],
) -> _Memory:
    family: dict[fx.Node, int] = {node: storage_of[node.name] for node in graph.nodes if node.name in storage_of}
    held = set(kept)
    for node in choices:
        source, made = family.get(node.args[0], -1), family.get(node, -1)  # type: ignore[arg-type]
        family = {other: source if number == made else number for other, number in family.items()}
        if made in held:
            held.add(source)
    return _Memory({node: i for i, node in enumerate(graph.nodes)}, family, frozenset(held), writes)


def _matters(choice: fx.Node, memory: _Memory) -> bool:
    """Tell whether one side of the operation is written after it while the other is still read."""
    number = memory.family.get(choice, -1)
    after = _made_from(choice, memory)
    alike = [node for node, other in memory.family.items() if other == number]
    for writer, target in memory.writes:
        if memory.family.get(target) != number or memory.order[writer] < memory.order[choice]:
            continue
        others = [node for node in alike if (node in after) != (target in after)]
        if number in memory.kept or any(
            memory.order[user] > memory.order[writer] for node in others for user in node.users
        ):
            return True
    return False


def _made_from(choice: fx.Node, memory: _Memory) -> set[fx.Node]:
    """Return the node and all that look at the memory it gives."""
    found = {choice}
    for node in itertools.islice(memory.order, memory.order[choice] + 1, None):
        sources = written_inputs(node) or node.args[:1]
        shares = memory.family.get(node) == memory.family.get(choice) or isinstance(node.meta.get("val"), tuple | list)
        if shares and any(source in found for source in sources):
            found.add(node)
    return found


def _conditions(choice: fx.Node) -> list[sympy.Basic]:
    """Return what excludes each size, of those tried, at which the operation shares memory otherwise than here."""
    symbols = _symbols(choice)
    example = dict(symbols)
    shares = _shares(choice, example)
    asked = _asked(choice)
    wrong: list[Sizes] = []
    right: list[Sizes] = []
    for sizes in _trials(example, asked, _least(choice, example)):
        try:
            (right if _shares(choice, sizes) == shares else wrong).append(sizes)
        except (RuntimeError, ValueError):
            continue  # the operation itself takes no such sizes
    needed: list[sympy.Basic] = []
    for condition in sorted(asked, key=lambda each: sum(not _holds(each, sizes) for sizes in right)):
        if any(not _holds(condition, sizes) for sizes in wrong):
            needed.append(condition)
            wrong = [sizes for sizes in wrong if _holds(condition, sizes)]
    return needed if not wrong else [sympy.Eq(symbol, size) for symbol, size in symbols]


def _symbols(node: fx.Node) -> list[tuple[sympy.Symbol, int]]:
    """Return the symbols in the layout of the operation's operand, with the example's sizes."""
    held = node.args[0].meta["val"]  # type: ignore[union-attr]
    found: dict[sympy.Symbol, int] = {}
    for size in (*held.size(), *held.stride()) if isinstance(held, Tensor) else ():
        if isinstance(size, torch.SymInt):
            hints = size.node.shape_env.backed_var_to_val
            found |= {symbol: int(hints[symbol]) for symbol in size.node.expr.free_symbols}
    return sorted(found.items(), key=lambda item: item[0].name)


def _shares(node: fx.Node, sizes: Sizes) -> bool:
    """Tell whether the operation gives its operand's memory at these sizes, on a device without values."""
    held = node.args[0].meta["val"]  # type: ignore[union-attr]
    shape, stride = ([_at(size, sizes) for size in numbers] for numbers in (held.size(), held.stride()))
    operand = torch.empty_strided(shape, stride, dtype=held.dtype, device="meta")
    return storage_number(_run(node, operand, sizes)) == storage_number(operand)


def _run(node: fx.Node, operand: Tensor, sizes: Sizes) -> Tensor:
    def given(value: Any) -> Any:
        held = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(held, Tensor):
            shape = [_at(size, sizes) for size in held.size()]
            return torch.empty(shape, dtype=held.dtype, device="meta")
        if isinstance(held, torch.device):
            return torch.device("meta")
        return _at(held, sizes)

    rest, kwargs = pytree.tree_map(given, (node.args[1:], node.kwargs))
    return node.target(operand, *rest, **kwargs)  # type: ignore[operator, no-any-return]


def _at(size: Any, sizes: Sizes) -> Any:
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size


def _asked(node: fx.Node) -> list[sympy.Basic]:
    """Return the conditions over sizes, true at the example's, that torch asks when it runs the operation."""
    held = node.args[0].meta["val"]  # type: ignore[union-attr]
    environment = _environment(held)
    original, heard = environment.evaluate_expr, dict[sympy.Basic, None]()

    def evaluate(expression: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        answer = original(expression, *args, **kwargs)
        if isinstance(expression, Boolean) and expression.free_symbols:
            heard[expression if answer in (True, sympy.true) else sympy.Not(expression)] = None
        return answer

    vars(environment)["evaluate_expr"] = evaluate
    try:
        with held.fake_mode, torch.no_grad():
            fresh = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device=held.device)
            args, kwargs = pytree.tree_map(
                lambda value: value.meta["val"] if isinstance(value, fx.Node) else value, (node.args[1:], node.kwargs)
            )
            node.target(fresh, *args, **kwargs)  # type: ignore[operator]
    finally:
        del vars(environment)["evaluate_expr"]
    return list(heard)


def _environment(held: Tensor) -> ShapeEnv:
    sizes = (size for size in (*held.size(), *held.stride()) if isinstance(size, torch.SymInt))
    environment: ShapeEnv = next(sizes).node.shape_env
    return environment


def _least(node: fx.Node, example: Sizes) -> Sizes:
    """Return the smallest size of each symbol; export does not look at 1, which the self-check may allow later."""
    ranges = _environment(node.args[0].meta["val"]).var_to_range  # type: ignore[union-attr]
    lower = {symbol: ranges[symbol].lower for symbol in example if symbol in ranges}
    return {symbol: int(size) if size > 2 else 1 for symbol, size in lower.items()}


def _trials(example: Sizes, asked: Sequence[sympy.Basic], least: Sizes) -> Iterator[Sizes]:
    tried = {symbol: {*_SMALL, size - 1, size, size + 1, 2 * size} - {0} for symbol, size in example.items()}
    for condition, (symbol, _) in itertools.product(asked, example.items()):
        tried[symbol] |= _turning(condition, symbol, example)
    tried = {symbol: {size for size in sizes if size >= least.get(symbol, 1)} for symbol, sizes in tried.items()}
    for sizes in itertools.islice(itertools.product(*tried.values()), _MOST):
        yield dict(zip(tried, sizes, strict=True))


def _turning(condition: sympy.Basic, symbol: sympy.Symbol, example: Sizes) -> set[int]:
    """Return the size of `symbol` at which an equation turns, the others being the example's."""
    if not isinstance(condition, sympy.Eq | sympy.Ne):
        return set()
    rest = (condition.lhs - condition.rhs).subs({s: size for s, size in example.items() if s != symbol})
    polynomial = sympy.Poly(rest, symbol) if rest.is_polynomial(symbol) and rest.has(symbol) else None
    if polynomial is None or polynomial.degree() != 1:
        return set()
    slope, constant = polynomial.all_coeffs()
    root = -constant / slope
    return {int(root)} if root.is_integer and root > 0 else set()


def _holds(condition: sympy.Basic, sizes: Sizes) -> bool:
    return bool(condition.subs(sizes))
