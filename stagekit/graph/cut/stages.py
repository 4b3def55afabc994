"""Build the graphs of the stages: what each takes, computes and returns, and the edges between them.

Own builder instead of fx.split_module, which numbers independent branches in an order of its own. Every stage graph
takes its inputs, then symbol values, then parameters, buffers and constants, then the seed base if it draws random
numbers. The chain is run once on fake tensors with autograd on: that gives the layout of each edge. Decides no cut
(graph.cut does) and makes no real tensor (graph.compile.module does).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from stagekit.errors import CaptureError
from stagekit.graph.compile.randomness import reseed
from stagekit.graph.cut.layout import Layout, is_size
from stagekit.graph.passes.aliasing import random_numbers
from stagekit.graph.passes.propagate import line_of, propagate
from stagekit.graph.passes.regions import move
from stagekit.plan.contract import Edge, InputRef, OutputSpec, StageInput, SymbolRef, TensorSpec, ValueRef

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured, Origin


@dataclass(frozen=True)
class StageGraph:
    """One stage as a graph. Placeholders: `inputs` in order, then `states`, then the seed base if `draws`."""

    index: int
    graph: fx.Graph
    inputs: tuple[StageInput, ...]
    states: tuple[Origin, ...]
    outputs: tuple[str, ...]
    draws: bool  # holds random operations
    has_regions: bool
    storages: Mapping[str, int]  # node name → number of the memory it lives in, as the fake run of the stage saw it


@dataclass(frozen=True)
class Chain:
    """All stages, the edges between them, and what the last one's outputs mean."""

    stages: tuple[StageGraph, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[OutputSpec, ...]
    edge_fakes: Mapping[str, Any]  # value name → fake tensor


@dataclass(frozen=True)
class _Plan:
    """What a stage must hold, before its graph exists."""

    nodes: tuple[fx.Node, ...]  # work and free nodes in the capture's order
    taken: tuple[fx.Node, ...]  # values of earlier stages
    placeholders: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]


def build_chain(captured: Captured, layout: Layout, stage_of: Mapping[fx.Node, int], stages: int) -> Chain:
    """Return the stages for an assignment of the work nodes to stages."""
    consumers = _consumers(captured.graph, layout, stage_of, stages)
    results = [n for n in pytree.tree_leaves(_output(captured.graph).args[0]) if isinstance(n, fx.Node)]
    numbers = random_numbers(captured.graph)
    fakes: dict[str, Any] = {}  # value name → fake tensor of an edge
    graphs, edges = [], []
    for index in range(stages):
        plan = _plan(layout, stage_of, consumers, results, index, index == stages - 1)
        built, outputs = _settle_outputs(captured, _build(captured, plan, index, numbers), fakes)
        graphs.append(built)
        for node, (name, fake) in zip(plan.returned, zip(built.outputs, outputs, strict=True), strict=True):
            if not node.meta["reached"]:  # no output's gradient depends on it: none comes back, as in the whole model
                fake.requires_grad_(False)
            fakes[name] = fake
            if index < stages - 1:
                edges.append(Edge(name, index, tuple(sorted(consumers[node])), captured.symbols.spec(fake)))
    return Chain(tuple(graphs), tuple(edges), _output_specs(captured, graphs[-1], fakes), fakes)


def _output(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return found


def _consumers(
    graph: fx.Graph, layout: Layout, stage_of: Mapping[fx.Node, int], stages: int
) -> dict[fx.Node, set[int]]:
    """Return per work value the later stages that read it; outputs are read by the last stage."""
    consumers: dict[fx.Node, set[int]] = {node: set() for node in layout.work}
    for node in layout.work:
        for user in node.users:
            reader = stages - 1 if user.op == "output" else stage_of.get(user)
            if reader is not None and reader != stage_of[node]:
                consumers[node].add(reader)
    return consumers


def _plan(
    layout: Layout,
    stage_of: Mapping[fx.Node, int],
    consumers: Mapping[fx.Node, set[int]],
    results: Sequence[fx.Node],
    index: int,
    is_last: bool,
) -> _Plan:
    own = [node for node in layout.nodes if stage_of.get(node) == index]
    wanted = [*own, *(results if is_last else ())]
    held: set[fx.Node] = set(own)
    taken: dict[fx.Node, None] = {}
    placeholders: dict[fx.Node, None] = {}
    todo = list(reversed(wanted))
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or is_size(node):
            continue
        seen.add(node)
        if node.op == "placeholder":
            placeholders[node] = None
        elif node in layout.work and stage_of[node] != index:
            taken[node] = None
        else:
            held.add(node)
            todo += node.all_input_nodes
    returned: Iterable[fx.Node] = dict.fromkeys(results) if is_last else (node for node in own if consumers[node])
    nodes = tuple(node for node in layout.nodes if node in held)
    order = {node: i for i, node in enumerate(layout.nodes)}
    return _Plan(
        nodes,
        tuple(sorted(taken, key=order.__getitem__)),
        tuple(placeholders),
        tuple(n for n in returned if not is_size(n)),
    )


class _Traced(PythonReferenceAnalysis):
    """Python's arithmetic on sizes as nodes, also where it wants a number at once: round, ceil, division.

    Each function keeps a size symbolic on fake tensors; float() and math.sqrt would make the example's out of it.
    """

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_float, x)

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return _call(operator.truediv, a, b)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def floor(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.ceil, x))

    @staticmethod
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _call(round, a)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _call(round, a, b)

    @staticmethod
    def sqrt(x: Any) -> Any:
        return _call(torch._sym_sqrt, x)  # type: ignore[attr-defined]


def _call(function: Callable[..., Any], *operands: Any) -> Any:
    """Return a function of sizes, as a node if one of them is one."""
    tracer = next((operand.tracer for operand in operands if isinstance(operand, fx.Proxy)), None)
    return function(*operands) if tracer is None else tracer.create_proxy("call_function", function, operands, {})


class _Builder:
    """Writes one stage's graph."""

    def __init__(self, captured: Captured, numbers: Mapping[fx.Node, int]) -> None:
        self.captured, self.numbers = captured, numbers
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.symbols: dict[Any, fx.Node] = {}  # export's symbol → placeholder
        self.seed: fx.Node | None = None

    def placeholder(self, source: fx.Node) -> None:
        """Take a value of the capture under its name."""
        self.values[source] = self.graph.placeholder(source.name)
        self.values[source].meta = {**source.meta, "copied_from": source.name}

    def size(self, node: fx.Node) -> Any:
        """Return a symbolic size, computed from the symbol placeholders."""
        value = node.meta["val"]
        if isinstance(value, int | float):
            return value
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        known = {symbol: fx.Proxy(held, tracer) for symbol, held in self.symbols.items()}
        try:
            result = sympy_interp(_Traced, known, value.node.expr)
        except Exception as error:
            raise CaptureError(
                f"{node.name}{line_of(node)} is a number computed from sizes, {value.node.expr}, that a stage can't compute; "
                "use +, -, *, /, //, round, floor and ceil, or pass it as an argument"
            ) from error
        return result.node if isinstance(result, fx.Proxy) else result

    def copy(self, node: fx.Node) -> None:
        """Append a node, reseeded if it draws random numbers."""
        for operand in node.all_input_nodes:
            if operand not in self.values:
                self.values[operand] = self.size(operand)
        if node in self.numbers:
            assert self.seed is not None
            self.graph.call_function(reseed, (self.seed, self.numbers[node], self.captured.device))
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        copied = self.graph.create_node(node.op, node.target, *arguments, name=node.name)
        copied.meta = {**node.meta, "copied_from": node.name}
        self.values[node] = copied


def _build(captured: Captured, plan: _Plan, index: int, numbers: Mapping[fx.Node, int]) -> StageGraph:
    builder = _Builder(captured, numbers)

    def of_kind(kind: str) -> list[fx.Node]:
        return [n for n in plan.placeholders if captured.origins[n.name].kind == kind]

    graph_inputs = sorted(
        (n for n in of_kind("input") if isinstance(n.meta["val"], Tensor)), key=lambda n: captured.origins[n.name].index
    )
    states = [*of_kind("parameter"), *of_kind("buffer"), *of_kind("constant")]
    used = {s for node in plan.nodes for n in node.all_input_nodes if is_size(n) for s in _free_symbols(n)}
    symbols = [(old, new) for old, new in captured.symbols.names.items() if old in used]
    for node in (*graph_inputs, *plan.taken):
        builder.placeholder(node)
    builder.symbols = {old: builder.graph.placeholder(new) for old, new in symbols}
    for node in states:
        builder.placeholder(node)
    draws = any(node in numbers for node in plan.nodes)
    if draws:
        builder.seed = builder.graph.placeholder("seed_base")
    regions: list[Any] = []
    for node in plan.nodes:
        move(builder.graph, regions, node.meta.get("context", ()))
        builder.copy(node)
    move(builder.graph, regions, ())
    own = set(plan.nodes)
    builder.graph.output(tuple(builder.values[node] for node in plan.returned))
    return StageGraph(
        index=index,
        graph=builder.graph,
        inputs=(
            *(InputRef(captured.origins[n.name].index) for n in graph_inputs),
            *(ValueRef(n.name) for n in plan.taken),
            *(SymbolRef(new) for _, new in symbols),
        ),
        states=tuple(captured.origins[n.name] for n in states),
        outputs=tuple(node.name if node in own else f"{node.name}_out" for node in plan.returned),
        draws=draws,
        has_regions=any(node.meta.get("context") for node in plan.nodes),
        storages={},
    )


def _free_symbols(node: fx.Node) -> set[Any]:
    value = node.meta["val"]
    return set() if isinstance(value, int | float | bool) else set(value.node.expr.free_symbols)


def stage_fakes(captured: Captured, stage: StageGraph, edge_fakes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fake value per placeholder of a stage's graph."""
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
    inputs = {o.index: name for name, o in captured.origins.items() if o.kind == "input"}
    by_name = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    sizes = {symbol.name: symbol for symbol in captured.symbols.symbols}
    fakes: dict[str, Any] = {}
    for node, source in zip(placeholders, (*stage.inputs, *stage.states), strict=False):
        if isinstance(source, InputRef):
            original = by_name[inputs[source.index]]
            fakes[node.name] = _again(original.meta["val"], original.meta["requires_grad"])
        elif isinstance(source, ValueRef):
            fake = edge_fakes[source.value]
            fakes[node.name] = _again(fake, fake.requires_grad)
        elif isinstance(source, SymbolRef):
            symbol = sizes[source.symbol]
            fakes[node.name] = by_name[inputs[symbol.graph_input]].meta["val"].size(symbol.dim)
        elif source.kind == "parameter":
            fakes[node.name] = _parameter(captured, captured.tensors[source.name])
        else:
            fakes[node.name] = _again(node.meta["val"], False)
    if stage.draws:
        fakes[placeholders[-1].name] = 0
    return fakes


def _again(fake: Tensor, requires_grad: bool) -> Tensor:
    return fake.detach().requires_grad_(requires_grad)


def _settle_outputs(
    captured: Captured, stage: StageGraph, edge_fakes: Mapping[str, Any]
) -> tuple[StageGraph, list[Tensor]]:
    """Run the stage on fake tensors; clone outputs that alias an input or are not dense. Returns the outputs' fakes."""
    fakes = stage_fakes(captured, stage, edge_fakes)
    storages = propagate(stage.graph, fakes, captured.mode)
    _check_still_symbolic(captured)
    given = {storages[node.name] for node in stage.graph.nodes if node.op == "placeholder" and node.name in storages}
    output = _output(stage.graph)
    results = []
    new_arguments = []
    returned: tuple[Any, ...] = output.args[0]  # type: ignore[assignment]
    for node in returned:
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            raise CaptureError(f"{node} crosses a cut and is a {type(fake).__name__}; only tensors can")
        if storages[node.name] in given or not _is_dense(*captured.symbols.example_shape(fake)):
            with stage.graph.inserting_before(output):
                clone = stage.graph.call_function(torch.ops.aten.clone.default, (node,))
            with captured.mode:
                clone.meta = {**node.meta, "val": fake.clone()}
            del clone.meta["copied_from"]
            node = clone
        new_arguments.append(node)
        results.append(_again(node.meta["val"], node.meta["requires_grad"]))
    output.args = (tuple(new_arguments),)
    stage.graph.lint()
    return replace(stage, storages=storages), results


def _check_still_symbolic(captured: Captured) -> None:
    """Refuse a stage that turned a size into the example's: its edges would be wrong for every other chunk."""
    replaced = captured.mode.shape_env.replacements if captured.mode.shape_env else {}
    fixed = [name for old, name in captured.symbols.names.items() if old in replaced and replaced[old].is_number]
    if fixed:
        names = {
            s.name: f"dimension {s.dim} of {captured.inputs[s.graph_input].name}" for s in captured.symbols.symbols
        }
        raise CaptureError(
            f"{names[fixed[0]]} may differ between chunks, but a stage computes with it in a way that holds for the example's "
            "size only; compute with +, -, *, /, //, round, floor and ceil of sizes, or pass the number as an argument"
        )


def _parameter(captured: Captured, parameter: Tensor) -> nn.Parameter:
    """Return a fake parameter in the mode of the capture, which export made."""
    with captured.mode:
        fake = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=captured.device)
    return nn.Parameter(fake, parameter.requires_grad)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _output_specs(captured: Captured, last: StageGraph, fakes: Mapping[str, Any]) -> tuple[OutputSpec, ...]:
    known = set(last.outputs)
    specs = []
    for index, leaf in enumerate(_output_leaves(captured)):
        if not isinstance(leaf, fx.Node):
            specs.append(OutputSpec(None, None, None, leaf))
            continue
        if is_size(leaf):
            value = leaf.meta["val"]
            if not isinstance(value, int | float):
                raise CaptureError(
                    f"the model returns {_output_name(captured, index)}, a number that differs between chunks: "
                    f"{captured.symbols.told(value, captured.inputs)}{line_of(leaf)}; leave it out and take it from the shape of "
                    "what you pass or of a returned tensor"
                )
            specs.append(OutputSpec(None, None, None, value))
            continue
        name = leaf.name if leaf.name in known else f"{leaf.name}_out"
        spec = captured.symbols.spec(fakes[name])
        specs.append(OutputSpec(name, spec, _merge_dim(captured, spec)))
    return tuple(specs)


def _output_leaves(captured: Captured) -> list[Any]:
    """Return the output's leaves in the order of `out_tree`, None included."""
    return list(pytree.tree_leaves(_output(captured.graph).args[0], is_leaf=lambda leaf: leaf is None))


def _output_name(captured: Captured, index: int) -> str:
    """Return how one reaches leaf number `index` of what the model returns: output['rows']."""
    numbers = pytree.tree_unflatten(list(range(captured.out_tree.num_leaves)), captured.out_tree)
    try:
        return "output" + pytree.keystr(pytree.tree_flatten_with_path(numbers)[0][index][0])
    except ValueError:  # a class of the user's, registered without keys
        return f"value {index}"


def _merge_dim(captured: Captured, spec: TensorSpec) -> int | None:
    """Return the dimension that carries the batch: a batch symbol, or as many rows as a static example has."""
    batch = {symbol.name for symbol in captured.symbols.symbols if symbol.is_batch}
    for dim, size in enumerate(spec.shape):
        if isinstance(size, str) and batch & set(re.findall(r"\w+", size)):
            return dim
    rows = {
        given.tensor.shape[given.split_dim] for given in captured.inputs if given.tensor and given.split_dim is not None
    }
    if not batch and spec.shape and spec.shape[0] in rows:
        return 0
    return None
