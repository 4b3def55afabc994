"""What pipelines get silently wrong elsewhere, under every schedule: the gradients, outputs and buffers of a plain loop.

All ranks run in this process (`run_local`). The lines that need real processes are in test_correct_or_loud.py, which says
where each one of them is tested.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagekit.api import capture_model, plan_pipeline
from stagekit.plan.schedules.registry import NAMES
from stagekit.testing import run_local

ROWS, CHUNKS, WIDTH, STAGES = 10, 4, 8, 4
PER_RANK = {"interleaved": 2, "bfs": 2, "zb-v": 2, "v-half": 2, "dualpipe-v": 2}
SCHEDULES = [name for name in NAMES if name != "forward"]


class Frozen(nn.Module):
    """The first stage trains nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Lora(nn.Module):
    """Mostly frozen: each large layer has two small ones that train, from the second one on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            low = self.up[number - 1](self.down[number - 1](x)) if number else 0.0
            x = torch.tanh(layer(x) + low)
        return x


class Twice(nn.Module):
    """One weight used twice in a stage, one parameter never."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(torch.relu(layer(x))))
        return x


class Tied(nn.Module):
    """The first and the last weight are one; so are those of the second and the third stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Skips(nn.Module):
    """Values skip stages, forward and backward; a scalar without dimensions crosses all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        first = self.layers[0](x)
        scale = first.square().mean()
        h = first
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h)) + first
        return h * scale


class Views(nn.Module):
    """Stages end in views, a transposed and an expanded value, and begin with an operation in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        h = self.layers[0](x).view(-1, 2, WIDTH // 2).transpose(1, 2)
        h = self.layers[1](h.reshape(-1, WIDTH)).relu_()[:, None, :].expand(-1, 3, -1)
        h = self.layers[2](h).mul_(2.0)
        return self.layers[3](h[:, ::2]).sum(1).t().contiguous().t()


class Results(nn.Module):
    """A dict with nested results, nothing, a constant, and a scalar."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return {"last": x, "hidden": (hidden[0], [hidden[2]]), "none": None, "name": 3, "mean": x.mean()}


class Masks(nn.Module):
    """An unbatched mask, a keyword without dimensions, one of a single row, and one that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask, *, scale, bias, power=1):
        for layer in self.layers:
            x = torch.tanh(layer(x) @ mask * scale + bias) ** power
        return x


class Norms(nn.Module):
    """BatchNorm counts its calls and keeps statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@dataclass(frozen=True)
class Case:
    """A model, the arguments that are no batch, and whether sums may come in another order than the plain loop's."""

    build: Any
    more: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reorders: bool = False


MASK = torch.eye(WIDTH) + torch.ones(WIDTH, WIDTH).triu(1) / WIDTH
KEYWORDS = {"scale": torch.tensor(0.5), "bias": torch.linspace(0, 1, WIDTH).view(1, WIDTH), "power": 2}
CASES = {
    "a frozen first stage": Case(Frozen),
    "a mostly frozen model": Case(Lora),
    "a weight used twice and one unused": Case(Twice),
    "tied weights over stages": Case(Tied, reorders=True),
    "values that skip stages, and a scalar": Case(Skips, reorders=True),
    "views, strides and writes in place": Case(Views, reorders=True),
    "dict, nested and no results": Case(Results, reorders=True),
    "masks and keywords without a batch": Case(Masks, (MASK,), KEYWORDS),
    "BatchNorm": Case(Norms),
}


def loss_of(output, target):
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum(((leaf - target) if leaf.ndim == 2 else leaf).square().mean() for leaf in leaves)


def batch():
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))


def built(case):
    torch.manual_seed(1)
    return case.build()


@functools.cache
def plain(name):
    """Gradients, buffers, loss and the chunks' outputs of the model alone."""
    case, (x, target) = CASES[name], batch()
    model, outputs, total = built(case), [], 0.0
    for rows, aim in zip(x.tensor_split(CHUNKS), target.tensor_split(CHUNKS), strict=True):
        output = model(rows, *case.more, **case.kwargs)
        loss = loss_of(output, aim)
        loss.backward(torch.tensor(len(rows) / ROWS))
        outputs.append(output)
        total += float(loss.detach()) * len(rows) / ROWS
    return model, outputs, total


@functools.cache
def captured(name):
    case, (x, _) = CASES[name], batch()
    return capture_model(built(case), (x[:3].clone(), *case.more), case.kwargs)


def piped(name, schedule, loss_fn=loss_of, **options):
    per_rank = PER_RANK.get(schedule, 1)
    return plan_pipeline(
        captured(name), loss_fn=loss_fn, stages=STAGES, stages_per_rank=per_rank, chunks=CHUNKS, schedule=schedule,
        split="layers", measured=False, **options,
    )  # fmt: skip


def assert_same(got, expected, case, schedule):
    if case.reorders or schedule == "dualpipe-v":
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(got, expected)


def product():
    """Every case under 1f1b, zb-v and every fourth of the other schedules, another quarter for each; the rest as soak."""
    for row, name in enumerate(CASES):
        for column, schedule in enumerate(SCHEDULES):
            is_run = schedule in ("1f1b", "zb-v") or (row + column) % 4 == 0
            yield pytest.param(name, schedule, marks=() if is_run else pytest.mark.soak)


@pytest.mark.parametrize(("name", "schedule"), product())
def test_a_schedule_gives_what_the_model_alone_gives(name, schedule):
    case, (x, target), calls = CASES[name], batch(), []

    def counted(output, target):
        calls.append(len(target))
        return loss_of(output, target)

    model, outputs, total = plain(name)
    result = run_local(piped(name, schedule, counted), x, *case.more, target=target, **case.kwargs)
    assert result.loss == pytest.approx(total, rel=1e-6)
    assert sorted(calls) == [2, 2, 3, 3]
    for key, parameter in model.named_parameters():
        assert (result.grads[key] is None) == (parameter.grad is None), key
        if parameter.grad is not None:
            assert_same(result.grads[key], parameter.grad, case, schedule)
    for key, buffer in model.named_buffers():
        assert torch.equal(result.buffers[key], buffer), key
    assert_outputs(result.output, outputs)


def assert_outputs(got, chunks):
    leaves, tree = pytree.tree_flatten(got)
    parts, trees = zip(*map(pytree.tree_flatten, chunks), strict=True)
    assert set(trees) == {tree}
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            assert leaf == parts[0][number]
        elif leaf.ndim:
            assert torch.equal(leaf, torch.cat([part[number] for part in parts]))
            assert not leaf.requires_grad


HALVED = [name for name in SCHEDULES if name.startswith(("zb", "v-", "dual"))]


@pytest.mark.parametrize(("schedule", "options"), [(name, {"recompute": True}) for name in HALVED])
def test_recomputed_stages_train_alike_under_zero_bubble_schedules(schedule, options):
    assert_trains_with("BatchNorm", schedule, options)


def test_compiled_stages_train_alike_under_a_zero_bubble_schedule():
    assert_trains_with("BatchNorm", "zb-h1", {"compile": "aot_eager"})


def assert_trains_with(name, schedule, options):
    x, target = batch()
    model, _, total = plain(name)
    result = run_local(piped(name, schedule, **options), x, target=target)
    assert result.loss == pytest.approx(total, rel=1e-6)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[key], parameter.grad, rtol=1e-5, atol=1e-6)
    for key, buffer in model.named_buffers():
        torch.testing.assert_close(result.buffers[key], buffer)
