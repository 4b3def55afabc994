"""The two halves of a stage's backward: weights whose gradient can wait until its input gradient is on its way.

Decides which weights those are, and notes in every forward what their gradient will need: the operation's input, and
the place in autograd's graph where the gradient of its output arrives. Only a weight that one operation of the stage
reads, and nothing else, is deferred: any other use would be lost. Its gradient is computed as autograd would, with the
same kernels in the same order, so that both give the same bits. Called by graph.compile.module; stagekit.run asks for
the halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]  # input, weight, gradient of the output → gradient of the weight


class Deferred:
    """One weight of one chunk, between its forward and its weight gradient.

    `edge`: where the gradient of the operation's output arrives; whoever runs the backward names it as wanted.
    """

    __slots__ = ("_arrived", "_input", "_rule", "_version", "edge", "parameter")

    def __init__(self, rule: Rule, x: Tensor, weight: nn.Parameter, y: Tensor) -> None:
        self.parameter, self._rule, self._input, self._version = weight, rule, x, x._version
        self._arrived: list[tuple[Tensor | None, ...]] = []
        node = y.grad_fn
        assert node is not None
        self.edge = GradientEdge(node, y.output_nr)
        node.register_prehook(self._arrived.append)  # not a method of ours: node and this object would hold each other

    def accumulate(self) -> None:
        """Add the weight's gradient to `.grad`; nothing, if no gradient arrived. Raises RuntimeError as autograd would."""
        gradient = self._arrived[0][self.edge.output_nr] if self._arrived else None
        if gradient is None:
            return
        if self._input._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input {list(self._input.shape)} of a layer whose weight gradient was still to be computed"
            )
        weight = self.parameter
        with torch.no_grad():
            made = self._rule(self._input, weight, gradient)
            if weight.grad is None:
                weight.grad = made
            else:
                weight.grad += made


class DeferredLog:
    """What the forward that ran last deferred, in the order of its operations."""

    def __init__(self) -> None:
        self._noted: list[Deferred] = []

    def noter(self, rule: Rule, dims: int) -> Callable[[Tensor, nn.Parameter, Tensor], None]:
        """Return what a stage's graph calls after an operation, with its input, weight of `dims` dimensions and output.

        What the rule is not for does not wait, see `waits`; nor does a weight that its owner froze since the capture.
        """

        def note(x: Tensor, weight: nn.Parameter, y: Tensor) -> None:
            if y.requires_grad and weight.requires_grad and waits(x, weight, dims):
                self._noted.append(Deferred(rule, x.detach(), weight, y))

        return note

    def take(self) -> list[Deferred]:
        """Return it, and begin anew."""
        noted, self._noted = self._noted, []
        return noted


def mark(graph: fx.Graph, trained: Collection[str]) -> None:
    """Mark the operations of a stage's graph whose weight can be deferred; `trained` are placeholders of parameters
    that train, each a tensor of its own.
    """
    for node in graph.nodes:
        weight = weight_of(node)
        node.meta["deferred"] = weight is not None and weight.name in trained and len(weight.users) == 1


def weight_of(node: fx.Node) -> fx.Node | None:
    """Return the operand of an operation whose gradient can wait, if nothing else reads it; None: there is none."""
    if node.op != "call_function" or node.kwargs or node.target not in _WEIGHT_AT:
        return None
    weight = node.args[_WEIGHT_AT[node.target]]
    has_constants = not any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(node.args[3:]))
    is_one = isinstance(weight, fx.Node) and sum(arg is weight for arg in node.args) == 1
    return weight if has_constants and is_one else None  # type: ignore[return-value]


def second_half(node: fx.Node, args: Sequence[Any], gradient: Tensor) -> Callable[[], Tensor] | None:
    """Return what computes the gradient of an operation's weight after its input's; None where it does not wait.

    `args` are the operation's, `gradient` is that of its output. For measuring what a stage will do.
    """
    position = _WEIGHT_AT[node.target]
    rule, dims = rule_of(node)
    x, weight = args[position - 1], args[position]
    if not waits(x, weight, dims):
        return None
    return lambda: rule(x.detach(), weight, gradient)


def waits(x: Tensor, weight: Tensor, dims: int) -> bool:
    """Say whether a weight of `dims` dimensions waits: no vectors, no single unbatched image, no complex numbers."""
    return x.ndim >= (2 if dims == 2 else dims) and weight.ndim == dims and not weight.is_complex()


def with_notes(bucket: fx.GraphModule, log: DeferredLog) -> fx.GraphModule:
    """Let a bucket's graph note its marked operations in `log`; returns `bucket`."""
    for node in list(bucket.graph.nodes):
        if node.op == "call_function" and node.meta.get("deferred"):  # placeholders of later buckets have it too
            position = _WEIGHT_AT[node.target]
            with bucket.graph.inserting_after(node):
                arguments = (node.args[position - 1], node.args[position], node)
                bucket.graph.call_function(log.noter(*rule_of(node)), arguments)
    bucket.recompile()
    return bucket


def rule_of(node: fx.Node) -> tuple[Rule, int]:
    """Return the rule of a marked operation, and the dimensions of the weights that it is for."""
    if node.target is aten.linear.default:
        return linear_rule, 2
    if node.target is aten.addmm.default:
        return addmm_rule, 2
    dims = _CONVOLUTIONS[node.target]
    return ConvolutionRule(dims, node.args[3:]), dims + 2


def linear_rule(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Gradient [out, in] of the weight of `linear`; x [..., in], gradient [..., out]. Under autocast both are cast alike."""
    rows = x.reshape(-1, x.shape[-1]).to(gradient.dtype)
    return gradient.reshape(-1, gradient.shape[-1]).t().mm(rows).to(weight.dtype)


def addmm_rule(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Gradient [in, out] of the second matrix of `addmm`; x [rows, in], gradient [rows, out]."""
    if weight.stride(0) == 1 and weight.stride(1) == weight.size(0):
        return gradient.t().mm(x.to(gradient.dtype)).t().to(weight.dtype)
    return x.to(gradient.dtype).t().mm(gradient).to(weight.dtype)


class ConvolutionRule:
    """Gradient of a convolution's weight, by torch's own kernel."""

    def __init__(self, dims: int, constants: tuple[Any, ...]) -> None:
        given = [*constants, *(1, 0, 1, 1)[len(constants) :]]
        groups = int(given.pop())
        self._options = [self._wide(value, dims) for value in given]
        self._dims, self._groups = dims, groups

    @staticmethod
    def _wide(value: Any, dims: int) -> list[int]:
        values = list(value) if isinstance(value, list | tuple) else [value]
        return values * dims if len(values) == 1 else values

    def __call__(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return it; x [rows, in, …], gradient [rows, out, …]."""
        stride, padding, dilation = self._options
        dtype = gradient.dtype
        made: Tensor = aten.convolution_backward(
            gradient, x.to(dtype), weight.to(dtype), None, stride, padding, dilation, False, [0] * self._dims,
            self._groups, (False, True, False),
        )[1]  # fmt: skip
        return made.to(weight.dtype)


_CONVOLUTIONS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_WEIGHT_AT: dict[Any, int] = {aten.linear.default: 1, aten.addmm.default: 2, **dict.fromkeys(_CONVOLUTIONS, 1)}
"""Position of the weight among the arguments; the operation's input stands before it."""
