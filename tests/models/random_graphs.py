"""Random models: a list of instructions over values, drawn by hypothesis, run as a module.

Each instruction takes earlier values by number and appends one or more new ones. There are branches and skips, weights
tied under two names, writes in place and through views, operations with several results, integers and masks, buffers,
regions without gradient, and randomness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 8


@dataclass(frozen=True)
class Instruction:
    """`a`, `b`, `c` pick operands among the values so far, or modules, modulo their number."""

    op: str
    a: int
    b: int
    c: int


class RandomModel(nn.Module):
    """Runs its instructions; `outputs` picks what it returns."""

    def __init__(self, instructions: tuple[Instruction, ...], outputs: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.instructions, self.outputs = instructions, outputs
        self.drop = nn.Dropout(dropout)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH), persistent=False)
        for instruction in instructions:
            if instruction.op == "linear":
                self.linears.append(nn.Linear(WIDTH, WIDTH))
            elif instruction.op == "tied linear":
                twin = nn.Linear(WIDTH, WIDTH)
                twin.weight = self.linears[instruction.b % len(self.linears)].weight
                self.linears.append(twin)

    def forward(self, x: Tensor, numbers: Tensor) -> Any:
        floats, ints = [x, self.linears[0](x)], [numbers]
        used = 0
        for step in self.instructions:
            if step.op in ("linear", "tied linear"):
                used += 1
            made = OPS[step.op](self, floats, ints, step, used)
            for value in made if isinstance(made, tuple | list) else (made,):
                (floats if value.is_floating_point() else ints).append(value)
        picked = [floats[i % len(floats)] for i in self.outputs]
        return {"first": picked[0], "rest": tuple(picked[1:]), "ints": ints[-1], "last": floats[-1]}


Op = Callable[[RandomModel, list[Tensor], list[Tensor], Instruction, int], Any]
OPS: dict[str, Op] = {}


def op(name: str) -> Callable[[Op], Op]:
    """Register an operation."""

    def register(function: Op) -> Op:
        OPS[name] = function
        return function

    return register


def _f(floats: list[Tensor], number: int) -> Tensor:
    return floats[number % len(floats)]


@op("linear")
@op("tied linear")
def _linear(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    return model.linears[used](_f(floats, s.a))


@op("reused linear")
def _reused(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    return torch.tanh(model.linears[s.b % (used + 1)](_f(floats, s.a)))


@op("combine")
def _combine(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, b = _f(floats, s.a), _f(floats, s.b)
    return [a + b, a * torch.sigmoid(b), a - 0.5 * b, torch.maximum(a, b), torch.atan2(a, b.abs() + 1)][s.c % 5]


@op("activate")
def _activate(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    return [torch.relu, torch.tanh, F.gelu, torch.sin, lambda t: t.softmax(-1), lambda t: F.layer_norm(t, (WIDTH,))][
        s.c % 6
    ](a)


@op("write in place")
def _in_place(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, b = _f(floats, s.a), _f(floats, s.b)
    match s.c % 5:
        case 0:
            return a.add_(b)
        case 1:
            return a.mul_(0.5)
        case 2:
            return torch.relu_(a)
        case 3:
            return a.clamp_(-1, 1)
        case _:
            return a.add_(1.0).tanh_()


@op("write a slice")
def _slice(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, b = _f(floats, s.a), _f(floats, s.b)
    target = a.clone() if s.c % 2 else torch.zeros_like(a)
    target[:, : 1 + s.c % 7] = b[:, : 1 + s.c % 7]
    return target


@op("write through a view")
def _view_write(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    base = a * 1.0
    window = base[:, s.c % 4 : 4 + s.c % 4]
    window.add_(_f(floats, s.b)[:, :4])
    return base, torch.cat([window, window], 1)


@op("keep a view")
def _view(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    match s.c % 4:
        case 0:
            return a.view(-1, 2, 4).transpose(1, 2).flatten(1)
        case 1:
            return a[:, [1, 0, 3, 2, 5, 4, 7, 6]]
        case 2:
            return a.t().t()
        case _:
            return a.mean(0, keepdim=True).expand_as(a)


@op("several results")
def _several(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    match s.c % 5:
        case 0:
            left, right = a.chunk(2, 1)
            return torch.cat([right, left], 1), torch.cat([left, left], 1)
        case 1:
            values, indices = a.sort(-1)
            return values, indices
        case 2:
            values, indices = a.topk(WIDTH, -1)
            return values, indices
        case 3:
            first, *rest = a.unbind(1)
            return torch.stack([*rest, first], 1)
        case _:
            values, indices = a.max(-1, keepdim=True)
            return values.expand(-1, WIDTH), indices.expand(-1, WIDTH)


@op("use integers")
def _integers(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, n = _f(floats, s.a), ints[s.b % len(ints)]
    match s.c % 4:
        case 0:
            return a.gather(1, n)
        case 1:
            return model.embed(n[:, 0]) + a
        case 2:
            return (n + 1) % WIDTH
        case _:
            return torch.where(n > 3, a, -a)


@op("mask")
def _mask(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, b = _f(floats, s.a), _f(floats, s.b)
    mask = a.detach() > b.detach().mean()
    return torch.where(mask, a, b), a.masked_fill(mask, 0.25)


@op("without gradient")
def _no_grad(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a, b = _f(floats, s.a), _f(floats, s.b)
    if s.c % 2:
        return a.detach() * b
    with torch.no_grad():
        frozen = torch.tanh(model.linears[s.c % (used + 1)](a))
    return frozen + b


@op("state")
def _state(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    match s.c % 4:
        case 0:
            model.total.add_(a.detach().mean(0))
            return a + model.total
        case 1:
            with torch.no_grad():
                model.total.mul_(0.9)
            return a * model.table
        case 2:
            return model.norm(a)
        case _:
            return a * model.scale


@op("draw")
def _draw(model: RandomModel, floats: list[Tensor], ints: list[Tensor], s: Instruction, used: int) -> Any:
    a = _f(floats, s.a)
    return [model.drop, lambda t: t + 0.1 * torch.rand_like(t), lambda t: t * torch.bernoulli(torch.full_like(t, 0.7))][
        s.c % 3
    ](a)


_numbers = st.integers(0, 11)
instructions = st.lists(
    st.builds(Instruction, st.sampled_from(sorted(OPS)), _numbers, _numbers, _numbers), min_size=4, max_size=14
).map(tuple)
outputs = st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple)
