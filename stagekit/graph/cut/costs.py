"""What each node of a capture costs: measured by running it alone on made-up operands, or estimated. Called by graph.cut.choose.

One node's operands are in memory at a time, never the model. Equal calls (same operator, shapes and constants) are timed
once, short ones in batches, on the thread's own clock where one thread does the work.
What autograd costs once per call, not per operation, is taken off, and adding into `.grad` is put on, so that the sum
over a stage is what the stage takes. Where the target device is absent, FLOPs and bytes are counted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from stagekit.graph.compile.deferred import second_half, weight_of
from stagekit.graph.cut.estimates import Seconds, by_bytes, by_flops, tensor_bytes
from stagekit.graph.cut.operands import made_up, operands
from stagekit.graph.passes.aliasing import written_inputs
from stagekit.graph.passes.propagate import entered

if TYPE_CHECKING:
    from stagekit.graph.capture.capture import Captured
    from stagekit.graph.cut.layout import Layout

__all__ = ["LINK_BYTES_PER_S", "LINK_S_PER_MESSAGE", "Cost", "made_up", "measure", "node_costs", "tensor_bytes"]

LINK_BYTES_PER_S = 2e9  # gloo over loopback at 1 MiB gives 3-6 GB/s; a copy on each side halves it
LINK_S_PER_MESSAGE = 5e-5  # a gloo hop takes 38-71 µs
_BATCH_S = 50e-6  # clocks resolve 0.1-1 µs: shorter calls are timed together
_ROUNDS_S = 0.004  # rounds of one pass go on for so long,
_ROUNDS = (2, 8)  # but there are so many
_PASSES = 5
_KIND_S = 2.0  # no further pass over a kind of call that took so long already


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one node at the example's sizes.

    `halves`: its backward in two parts, input gradient and later the weight's, where that can wait if its stage reads
    the weight nowhere else; None: all of the backward runs at once.
    """

    forward_s: float
    backward_s: float
    halves: tuple[float, float] | None = None

    def at_speed(self, speed: float) -> Cost:
        """Return what it costs on a rank of that speed."""
        halves = (self.halves[0] / speed, self.halves[1] / speed) if self.halves else None
        return Cost(self.forward_s / speed, self.backward_s / speed, halves)


def node_costs(captured: Captured, layout: Layout, how: str) -> dict[str, Cost]:
    """Return what each operation costs; `how` as in `measure`."""
    return measure(captured, [node for node in layout.nodes if node in layout.work], how)


def measure(captured: Captured, nodes: Sequence[fx.Node], how: str = "measured") -> dict[str, Cost]:
    """Return the cost per node name; generators and the model's own tensors stay untouched.

    `how`: "measured", "flops" or "bytes".
    """
    kinds: dict[str, fx.Node] = {}
    signatures = {node: _signature(captured, node) for node in nodes}
    for node, signature in signatures.items():
        kinds.setdefault(signature, node)
    if how == "measured" and not (captured.device == "cpu" or torch.get_device_module(captured.device).is_available()):
        how = "flops"
    if how == "measured":
        known = _measured(captured, kinds)
    else:
        count = by_flops if how == "flops" else by_bytes
        known = {signature: _estimated(captured, node, count) for signature, node in kinds.items()}
    return {node.name: known[signature] for node, signature in signatures.items()}


def _signature(captured: Captured, node: fx.Node) -> str:
    def describe(n: fx.Node) -> Any:
        value = n.meta["val"]
        if isinstance(value, Tensor):
            shape = captured.symbols.example_shape(value)
            return (*shape, str(value.dtype), n.meta["requires_grad"], _is_parameter(captured, n))
        return str(captured.symbols.example(value))

    shown = [describe(n) for n in node.all_input_nodes]
    constants = fx.map_arg((node.args, node.kwargs), lambda n: "·")
    return f"{node.target} {constants} {shown} {node.meta.get('context')}"


def _is_parameter(captured: Captured, node: fx.Node) -> bool:
    return node.op == "placeholder" and captured.origins[node.name].kind == "parameter"


def trained_weight_of(captured: Captured, node: fx.Node) -> fx.Node | None:
    """Return the trained parameter of an operation whose gradient can wait; None: there is none."""
    weight = weight_of(node)
    trains = weight is not None and _is_parameter(captured, weight) and weight.meta["requires_grad"]
    return weight if trains else None


def _estimated(captured: Captured, node: fx.Node, count: Callable[[Captured, fx.Node], Seconds]) -> Cost:
    forward_s, backward_s = count(captured, node)
    if trained_weight_of(captured, node) is None:
        return Cost(forward_s, backward_s)
    late_s = min(forward_s, backward_s)  # each gradient of a product takes as much as the product
    return Cost(forward_s, backward_s, (backward_s - late_s, late_s))


def _measured(captured: Captured, kinds: Mapping[str, fx.Node]) -> dict[str, Cost]:
    """Return the timed cost per kind of call; an estimate for those that can't run on made-up operands.

    All of them again and again, instead of each one for long: what else the machine does then slows none of them only.
    The typical pass counts: in the best one a short call finds a quiet moment, a long one never does.
    """
    found: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    spent = dict.fromkeys(kinds, 0.0)
    devices = [torch.cuda.current_device()] if captured.device == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for _ in range(_PASSES):
            for kind, node in kinds.items():
                if spent[kind] > _KIND_S:
                    continue
                started = time.perf_counter()
                cost = _alone(captured, node)
                spent[kind] += time.perf_counter() - started
                if cost is None:
                    cost, spent[kind] = _estimated(captured, node, by_flops), float("inf")
                found[kind].append(cost)
    return {kind: _typical(costs) for kind, costs in found.items()}


def _typical(costs: Sequence[Cost]) -> Cost:
    halves = [cost.halves for cost in costs if cost.halves]
    typical = (median(early for early, _ in halves), median(late for _, late in halves)) if halves else None
    return Cost(median(cost.forward_s for cost in costs), median(cost.backward_s for cost in costs), typical)


def _alone(captured: Captured, node: fx.Node) -> Cost | None:
    for integers in (0, 1):
        try:
            cost = _timed(captured, node, integers)
        except Exception:  # values that an operator refuses
            continue
        weight = trained_weight_of(captured, node)
        rest_s = sum(_accumulating_s(captured, n) for n in node.all_input_nodes if n is not weight)
        late_s = _accumulating_s(captured, weight) if weight is not None else 0.0
        halves = (cost.halves[0] + rest_s, cost.halves[1] + late_s) if cost.halves else None
        return Cost(cost.forward_s, cost.backward_s + rest_s + late_s, halves)
    return None


def _timed(captured: Captured, node: fx.Node, integers: int) -> Cost:
    args, kwargs = operands(captured, node, integers=integers)
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    if any(n.meta["requires_grad"] for n in written_inputs(node)):  # autograd refuses to write into a leaf
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad else t, (args, kwargs))
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    with entered(node.meta.get("context", ())):
        forward_s = _fastest(captured.device, lambda: target(*args, **kwargs))
        outputs = pytree.tree_leaves(target(*args, **kwargs))
    roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if not roots or not leaves:
        return Cost(forward_s, 0.0)
    cotangents = [torch.ones_like(root) for root in roots]

    def backward_s(wanted: Sequence[Tensor]) -> float:
        whole_s = _fastest(
            captured.device,
            lambda: torch.autograd.grad(roots, wanted, cotangents, retain_graph=True, allow_unused=True),
        )
        return max(whole_s - _engine_s(), 0.0)

    halves, weight = None, trained_weight_of(captured, node)
    if weight is not None and (late := second_half(node, args, cotangents[0])) is not None:
        early = [leaf for leaf in leaves if leaf is not args[node.args.index(weight)]]
        with torch.no_grad():
            halves = (backward_s(early) if early else 0.0, _fastest(captured.device, late))
    return Cost(forward_s, backward_s(leaves), halves)


def _accumulating_s(captured: Captured, operand: fx.Node) -> float:
    """Return the time to add the gradient of a parameter to those of the chunks before; 0 for what is none."""
    if not (_is_parameter(captured, operand) and operand.meta["requires_grad"]):
        return 0.0
    parameter = made_up(captured, operand.meta["val"], False)
    gradient = torch.zeros_like(parameter)
    return _fastest(captured.device, functools.partial(gradient.add_, parameter))


@functools.cache
def _engine_s() -> float:
    """Return what one call of the autograd engine costs beside its nodes, on this machine."""

    def chain(length: int) -> float:
        leaf = torch.zeros(1, requires_grad=True)
        root, ones = leaf, torch.ones(1)
        for _ in range(length):
            root = root.view_as(root)
        return _fastest("cpu", lambda: torch.autograd.grad([root], [leaf], [ones], retain_graph=True))

    one, eleven = chain(1), chain(11)
    return max(one - (eleven - one) / 10, 0.0)


def _fastest(device: str, run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several rounds."""
    synchronize = torch.get_device_module(device).synchronize
    # Its own clock is blind to what else the machine does; with several threads only the wall knows.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def timed(calls: int) -> float:
        synchronize()
        started = clock()
        for _ in range(calls):
            run()
        synchronize()
        return (clock() - started) / calls

    run()
    once = max(timed(1), 1e-7)
    calls = max(1, round(_BATCH_S / once))
    rounds = min(max(round(_ROUNDS_S / (once * calls)), _ROUNDS[0]), _ROUNDS[1])
    return min(once, *(timed(calls) for _ in range(rounds)))
