"""The DDP split: a graph in consecutive buckets of parameters, each compiled on its own.

A compiled backward releases its gradients when its graph returns, so separate buckets let the all-reduce of one
overlap the backward of the next. After torch dynamo's DDPOptimizer, which walks the graph backward and opens a new
bucket once the cap is reached. `split` stands alone; `backend` makes a torch.compile backend of it; graph.cut.stages uses
it inside every stage. The caller's graph is left untouched, and nothing of the real model runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stagekit.errors import UserError
from stagekit.graph.buckets.arguments import check_graph, check_ignored, check_names, checked_result
from stagekit.graph.buckets.dump import dump
from stagekit.graph.buckets.fakes import as_traced, fake_inputs, fake_outputs
from stagekit.graph.buckets.rule import BucketRule
from stagekit.graph.buckets.spans import written_spans
from stagekit.graph.compile.compilers import check_backend
from stagekit.graph.compile.pieces import Piece, pieces_of
from stagekit.graph.compile.randomness import reseed
from stagekit.graph.passes.regions import closes_region, opens_region

CompileFn = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Weights = Mapping[str, int]  # parameter name → bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive nodes of one bucket, in execution order, and the parameters counted there."""

    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One bucket: what it holds. `num_nodes` counts operations."""

    size_bytes: int
    parameters: tuple[str, ...]
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Report:
    """The buckets, last layers first, and the rule that made them."""

    rule: BucketRule
    buckets: tuple[BucketReport, ...]

    def __str__(self) -> str:
        first = self.rule.cap_of(0)
        lines = [f"{len(self.buckets)} bucket(s), cap {self.rule.cap_bytes} bytes, first {first} bytes"]
        lines += [
            f"  {i}: {b.size_bytes} bytes, {b.num_nodes} nodes: {', '.join(b.parameters) or 'no parameters'}"
            for i, b in enumerate(self.buckets)
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SplitResult:
    """What to call instead of the graph, and what it is made of."""

    module: Callable[..., Any]
    report: Report


def split(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    cap_bytes: int,
    first_cap_bytes: int | None = None,
    ignored: Collection[str | nn.Parameter] = (),
    compile_fn: CompileFn,
    dump_dir: str | Path | None = None,
    runs_eagerly: Callable[[fx.Node], bool] | None = None,
) -> SplitResult:
    """Split `gm` into buckets of at least `cap_bytes` and compile each with `compile_fn(bucket, fake inputs)`.

    A parameter counts if it requires grad and is not in `ignored` (parameters, or names as in the graph); each once.
    Graphs whose parameters are inputs count them by `example_inputs`. One bucket: `compile_fn(gm, example_inputs)`
    itself. `dump_dir` gets the graphs as text, one file per bucket. Operations for which `runs_eagerly` says True are not
    compiled: a bucket that holds some is compiled in pieces between them. Raises UserError for arguments that can't be, and
    for a name in `ignored` that the graph does not have.
    """
    rule = BucketRule(cap_bytes, first_cap_bytes)
    check_graph(gm, example_inputs, compile_fn)
    check_ignored(ignored)
    check_names(ignored, (name for _, name, _ in _parameters(gm, example_inputs)))
    return _split(gm, example_inputs, rule, ignored, compile_fn, dump_dir, runs_eagerly)


def _split(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    rule: BucketRule,
    ignored: Collection[str | nn.Parameter],
    compile_fn: CompileFn,
    dump_dir: str | Path | None,
    runs_eagerly: Callable[[fx.Node], bool] | None = None,
) -> SplitResult:
    weights = parameter_weights(gm, example_inputs, ignored)
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    legal = legal_begins(gm.graph, written_spans(gm, example_inputs))
    groups = group_nodes(gm.graph, weights, rule, legal=legal)
    report = Report(rule, tuple(BucketReport(g.size_bytes, g.parameters, len(g.nodes)) for g in reversed(groups)))
    parts = [Piece(group.nodes, False) for group in groups]
    if runs_eagerly is not None:
        parts = pieces_of(nodes, legal, [part.nodes for part in parts], runs_eagerly)
    if len(parts) <= 1:
        if parts and parts[0].is_eager:
            compile_fn = as_it_is
        compiled = checked_result(compile_fn(gm, list(example_inputs)), "the whole graph")
        if dump_dir is not None:
            dump(
                Path(dump_dir),
                report=str(report),
                original=gm,
                split=None,
                buckets=[gm],
                arguments=[list(example_inputs)],
            )
        return SplitResult(compiled, report)
    outer, buckets = build_chain(gm, [part.nodes for part in parts])
    compile_fns = [as_it_is if part.is_eager else compile_fn for part in parts]
    arguments = _compile_chain(outer, example_inputs, compile_fns)
    if dump_dir is not None:
        dump(Path(dump_dir), report=str(report), original=gm, split=outer, buckets=buckets, arguments=arguments)
    return SplitResult(outer, report)


def as_it_is(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile nothing."""
    return gm


def backend(
    *,
    cap_bytes: int,
    inner: str | Callable[..., Any] = "inductor",
    first_cap_bytes: int | None = None,
    ignored: Collection[str | nn.Parameter] = (),
    dump_dir: str | Path | None = None,
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """Return a backend for torch.compile that splits each graph and compiles the buckets with `inner`.

    A compile can give several graphs, so a name in `ignored` counts where a graph has it. Raises UserError for arguments
    that can't be.
    """
    rule = BucketRule(cap_bytes, first_cap_bytes)
    check_ignored(ignored)
    if not (isinstance(inner, str) or callable(inner)):
        raise UserError(f'inner is {inner!r}; name a backend of torch.compile such as "inductor", or give a function')
    if isinstance(inner, str):
        check_backend(inner, argument="inner")
    compile_fn = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner

    def compile_split(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return _split(gm, example_inputs, rule, ignored, compile_fn, dump_dir).module

    return compile_split


def parameter_weights(
    gm: fx.GraphModule, example_inputs: Sequence[Any], ignored: Collection[str | nn.Parameter] = ()
) -> dict[fx.Node, dict[str, int]]:
    """Return per operand node the parameters it stands for, with their bytes; a tied one has one name everywhere."""
    names = {name for name in ignored if isinstance(name, str)}
    ids = {id(parameter) for parameter in ignored if not isinstance(parameter, str)}
    first_name: dict[int, str] = {}
    weights: dict[fx.Node, dict[str, int]] = {}
    for node, name, value in _parameters(gm, example_inputs):
        if not value.requires_grad:
            continue
        key = first_name.setdefault(id(value), name)
        if not {name, key} & names and id(value) not in ids and not getattr(value, "_ddp_ignored", False):
            weights.setdefault(node, {})[key] = value.numel() * value.element_size()
    return weights


def _parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, str, nn.Parameter]]:
    """Yield each node that stands for parameters, with each one's name in the graph."""
    inputs = iter(example_inputs)
    for node in gm.graph.nodes:
        found: dict[str, Any] = {}
        if node.op == "placeholder":
            found = {node.name: next(inputs, None)}
        elif node.op == "get_attr":
            found = {str(node.target): _attribute(gm, str(node.target))}
        elif node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            found = {f"{node.target}.{name}": p for name, p in module.named_parameters()}
        yield from ((node, name, value) for name, value in found.items() if isinstance(value, nn.Parameter))


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def group_nodes(
    graph: fx.Graph,
    weights: Mapping[fx.Node, Weights],
    rule: BucketRule,
    *,
    legal: Collection[int],
) -> list[Group]:
    """Return the buckets in execution order; the walk is backward, so bucket 0 of the rule is the last one here.

    `legal`: positions among the operations where a bucket may begin.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    legal = {*legal, len(nodes)}
    groups: list[tuple[list[fx.Node], dict[str, int]]] = [([], {})]
    counted: set[str] = set()
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        members, held = groups[-1]
        if sum(held.values()) >= rule.cap_of(len(groups) - 1) and position + 1 in legal:
            groups.append(([], {}))
            members, held = groups[-1]
        members.append(node)
        operands = [
            operand for operand in node.all_input_nodes if operand.op != "call_module"
        ]  # that one counts itself
        for operand in (node, *operands):
            for name, size in weights.get(operand, {}).items():
                if name not in counted:
                    counted.add(name)
                    held[name] = size
    in_order = [(members[::-1], held) for members, held in reversed(groups)]
    return [Group(tuple(m), tuple(h), sum(h.values())) for m, h in _fuse(graph, in_order)]


def _fuse(
    graph: fx.Graph, groups: list[tuple[list[fx.Node], dict[str, int]]]
) -> list[tuple[list[fx.Node], dict[str, int]]]:
    """Merge a parameterless preamble, and any bucket whose outputs nobody needs, into the following bucket."""
    result: list[tuple[list[fx.Node], dict[str, int]]] = []
    for members, held in groups:
        if result and ((not result[0][1] and len(result) == 1) or not _is_read(result[-1][0])):
            members, held = result[-1][0] + members, {**result[-1][1], **held}
            result.pop()
        result.append((members, held))
    if len(result) > 1 and not _is_read(result[-1][0]):
        members, held = result.pop()
        result[-1] = (result[-1][0] + members, {**result[-1][1], **held})
    return result


def _is_read(members: list[fx.Node]) -> bool:
    inside = set(members)
    return any(user not in inside for node in members for user in node.users)


def legal_begins(graph: fx.Graph, held: Sequence[tuple[fx.Node, fx.Node]]) -> set[int]:
    """Return positions where a bucket may begin: no open region, no lone reseed, no tuple parted from its readers.

    `held`: first and last nodes of stretches that stay whole.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    order = {node: i for i, node in enumerate(nodes)}
    blocked = [0] * (len(nodes) + 1)
    depth = 0
    legal = set()
    for i, node in enumerate(nodes):
        readers = [order[user] for user in node.users if user.target is operator.getitem and user in order]
        if readers:
            blocked[i + 1] += 1
            blocked[max(readers) + 1] -= 1
    for first, last in held:
        blocked[order[first] + 1] += 1
        blocked[order[last] + 1] -= 1
    inside = 0
    for i, node in enumerate(nodes):
        inside += blocked[i]
        if depth == 0 and inside == 0 and (i == 0 or nodes[i - 1].target is not reseed):
            legal.add(i)
        depth += opens_region(node) - closes_region(node)
    return legal | {len(nodes)}


def build_chain(gm: fx.GraphModule, groups: Sequence[Sequence[fx.Node]]) -> tuple[fx.GraphModule, list[fx.GraphModule]]:
    """Return a graph module that calls one submodule per group, in order, and the submodules."""
    outer = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = outer.node_copy(node, lambda n: values[n])
    root = nn.Module()
    buckets = []
    for index, group in enumerate(groups):
        bucket, operands, results = _bucket(gm, group)
        buckets.append(bucket)
        root.add_module(f"bucket_{index}", bucket)
        call = outer.call_module(f"bucket_{index}", tuple(values[n] for n in operands))
        for position, node in enumerate(results):
            values[node] = outer.call_function(operator.getitem, (call, position))
    output = next(node for node in gm.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if node not in values:
            values[node] = outer.node_copy(node, lambda n: values[n])  # a get_attr that is returned as it is
            _share_attribute(gm, root, str(node.target))
    outer.output(fx.map_arg(output.args[0], lambda n: values[n]))
    return fx.GraphModule(root, outer), buckets


def _share_attribute(gm: fx.GraphModule, root: nn.Module, target: str) -> None:
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    setattr(root, name, _attribute(gm, target))


def _bucket(gm: fx.GraphModule, group: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Return the bucket's graph module, the outer nodes it takes and its nodes that are read outside."""
    inside = set(group)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    operands: list[fx.Node] = []
    for node in group:
        for operand in node.all_input_nodes:
            if operand not in values and operand not in inside and operand.op != "get_attr":
                operands.append(operand)
                values[operand] = graph.placeholder(operand.name)
                values[operand].meta = dict(operand.meta)
    for node in group:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and operand not in values:
                values[operand] = graph.node_copy(operand)
        values[node] = graph.node_copy(node, lambda n: values[n])
    results = [node for node in group if any(user not in inside for user in node.users)]
    graph.output(tuple(values[node] for node in results))
    return fx.GraphModule(gm, graph), operands, results


def _compile_chain(
    outer: fx.GraphModule, example_inputs: Sequence[Any], compile_fns: Sequence[CompileFn]
) -> list[list[Any]]:
    """Compile the submodules in order, their inputs fake; return the inputs of each for the dump."""
    placeholders = [node for node in outer.graph.nodes if node.op == "placeholder"]
    mode, fakes = fake_inputs([as_traced(*pair) for pair in zip(placeholders, example_inputs, strict=True)])
    values: dict[fx.Node, Any] = {}
    arguments = []
    inputs, compilers = iter(fakes), iter(compile_fns)
    for node in outer.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "call_module":
            bucket = outer.get_submodule(str(node.target))
            assert isinstance(bucket, fx.GraphModule)
            taken = [values[operand] for operand in node.args]
            arguments.append(taken)
            values[node] = fake_outputs(bucket, taken, mode)
            compiled = _in_mode(next(compilers), mode)(bucket, taken)
            outer.set_submodule(str(node.target), Compiled(checked_result(compiled, str(node.target))))
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
    return arguments


def _in_mode(compile_fn: CompileFn, mode: FakeTensorMode) -> CompileFn:
    def run(bucket: fx.GraphModule, taken: list[Any]) -> Callable[..., Any]:
        return compile_fn(bucket, [t.detach().requires_grad_(t.requires_grad) if _is_inner(t) else t for t in taken])

    return run


def _is_inner(value: Any) -> bool:
    """Tell whether a fake tensor carries the autograd graph of the bucket before it."""
    return isinstance(value, Tensor) and value.grad_fn is not None


class Compiled(nn.Module):
    """A compiled bucket as a submodule; compiled functions are no modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        """Run the bucket; always a tuple."""
        return self._function(*args)
