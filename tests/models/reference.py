"""A reference runner: the stages of a cut, one after another, in this process and with plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stagekit.graph.cut.cut import Cut
from stagekit.plan.contract import InputRef, SymbolRef, ValueRef


class Chain:
    """All stages of a cut; `forward` cuts the autograd graph at each edge, `backward` carries gradients back."""

    def __init__(self, cut: Cut, **options: Any) -> None:
        self.cut, self.spec = cut, cut.spec
        self.modules: list[nn.Module] = [cut.stage_module(i, **options) for i in range(len(cut.spec.stages))]

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, seed_base: int = 0) -> Any:
        leaves = self.cut.captured.flatten_inputs(args, kwargs)
        sizes = {s.name: leaves[s.graph_input].size(s.dim) for s in self.spec.symbols}
        self.made: dict[str, Tensor] = {}
        self.read: list[tuple[str, Tensor]] = []
        tensors = {edge.value: edge.tensor for edge in self.spec.edges}
        for stage, module in zip(self.spec.stages, self.modules, strict=True):
            inputs: list[Any] = []
            for source in stage.inputs:
                match source:
                    case InputRef(index):
                        inputs.append(leaves[index])
                    case SymbolRef(symbol):
                        inputs.append(sizes[symbol])
                    case ValueRef(value):
                        given = self.made[value].detach().clone().requires_grad_(tensors[value].requires_grad)
                        self.read.append((value, given))
                        inputs.append(given)
            module.set_seed_base(seed_base)  # type: ignore[operator]
            outputs = module(*inputs)
            for name, output in zip(stage.outputs, outputs, strict=True):
                if name in tensors:
                    assert output.requires_grad or not tensors[name].requires_grad, name
                    expected = tuple(evaluate(size, sizes) for size in tensors[name].shape)
                    stride = tuple(evaluate(size, sizes) for size in tensors[name].stride)
                    assert tuple(output.shape) == expected, name
                    assert output.stride() == stride or 1 in output.shape, (name, output.stride(), stride)
                    assert str(output.dtype) == f"torch.{tensors[name].dtype}"
                self.made[name] = output
        results = [o.constant if o.value is None else self.made[o.value] for o in self.spec.outputs]
        return self.cut.captured.unflatten_output(results)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for stage in reversed(self.spec.stages[:-1]):
            roots, grads = [], []
            for name in stage.outputs:
                given = [value.grad for value_name, value in self.read if value_name == name and value.grad is not None]
                if given:
                    roots.append(self.made[name])
                    grads.append(torch.stack(given).sum(0) if len(given) > 1 else given[0])
            if roots:
                torch.autograd.backward(roots, grads)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by canonical name, those of tied weights summed over the stages."""
        summed: dict[str, Tensor] = {}
        for stage, module in zip(self.spec.stages, self.modules, strict=True):
            held = dict(module.named_parameters(remove_duplicate=False))
            for parameter in stage.parameters:
                grad = held[parameter.name].grad
                if grad is not None:
                    summed[parameter.name] = summed[parameter.name] + grad if parameter.name in summed else grad
        return summed

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for module in self.modules for name, value in module.state_dict().items()}


def evaluate(size: int | str, sizes: Mapping[str, int]) -> int:
    """Return a size of the spec for these symbol values."""
    return size if isinstance(size, int) else int(eval(size, {"__builtins__": {}}, dict(sizes)))
