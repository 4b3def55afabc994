"""A model cut into stages computes what the unsplit model computes: outputs, every gradient by name, every buffer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from reference import Chain
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import Case, Dropout, awkward

from stagekit.graph.capture.capture import Captured, capture

SEED = 7


@functools.cache
def captured(name: str) -> tuple[Case, Captured, nn.Module]:
    case = next(case for case in awkward() if case.name == name)
    args, kwargs = copy.deepcopy((case.args, case.kwargs))
    model = capture(functools.partial(case.build, 0.0), args, kwargs, seed=SEED)
    torch.manual_seed(SEED)
    return case, model, case.build(0.0)


def reduce(output: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf * (i + 1)).sum() for i, leaf in enumerate(leaves)]).sum()


def check_equal(got: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if exact:
            assert torch.equal(got[name], value), name
        else:
            assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max() + 1e-9)), name


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", [case.name for case in awkward()])
def test_a_cut_model_computes_what_the_unsplit_model_computes(name: str, stages: int) -> None:
    case, model, start = captured(name)
    reference = copy.deepcopy(start)
    cut = model.cut("balanced", stages)
    chain = Chain(cut)

    state = chain.state_dict()
    assert state.keys() == start.state_dict().keys()
    check_equal(state, start.state_dict(), exact=True)

    args, kwargs = copy.deepcopy((case.args, case.kwargs))
    before = copy.deepcopy((args, kwargs))
    output = chain.forward(args, kwargs)
    check_equal(dict(_numbered((args, kwargs))), dict(_numbered(before)), exact=True)
    expected = reference(*args, **kwargs)
    assert type(output) is type(expected)
    chain.backward(reduce(output))
    reduce(expected).backward()

    check_equal(dict(_numbered(output)), dict(_numbered(expected)), exact=case.exact or stages == 1)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    check_equal(chain.gradients(), gradients, exact=case.exact or stages == 1)
    check_equal(chain.state_dict(), reference.state_dict(), exact=case.exact or stages == 1)


def _numbered(tree: Any) -> list[tuple[str, Tensor]]:
    return [(str(i), leaf) for i, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", ["gpt", "skip connections", "tied", "gpt2 program"])
def test_the_same_capture_takes_other_batch_sizes(name: str) -> None:
    case, model, start = captured(name)
    chain = Chain(model.cut("parameters", 3))
    for rows in (1, 3, 9):
        args, kwargs = pytree.tree_map(lambda t, rows=rows: _with_rows(t, rows), (case.args, case.kwargs))
        check_equal(
            dict(_numbered(chain.forward(args, kwargs))),
            dict(_numbered(copy.deepcopy(start)(*args, **kwargs))),
            exact=False,
        )


def _with_rows(value: Any, rows: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    return value.repeat(rows, *[1] * (value.ndim - 1))[:rows].clone()


@pytest.mark.parametrize("build", [lambda: Dropout(), lambda: nn.Sequential(Dropout(), nn.Dropout(0.5))])
def test_dropout_does_not_depend_on_the_cut(build: Any) -> None:
    x = torch.randn(6, 4, 16)
    model = capture(build, (x,), seed=SEED)
    results = []
    for stages in (1, 2, 4):
        chain = Chain(model.cut("balanced", stages))
        first = chain.forward((x,), seed_base=11)
        chain.backward(first.sum())
        results.append((first, chain.gradients()))
        assert not torch.equal(chain.forward((x,), seed_base=12), first)
        assert torch.equal(chain.forward((x,), seed_base=11), first)
    for output, gradients in results[1:]:
        assert torch.equal(output, results[0][0])
        check_equal(gradients, results[0][1], exact=True)


def test_a_recapture_cuts_where_the_published_plan_says() -> None:
    case, model, _ = captured("gpt2 program")
    cut = model.cut("balanced", 3)
    again = capture(functools.partial(case.build, 0.0), case.args, case.kwargs, seed=SEED, check=False)
    assert again.graph_hash == model.graph_hash
    repeated = again.cut("balanced", 3, at_nodes=[stage.first_node for stage in cut.spec.stages])
    for a, b in zip(cut.spec.stages, repeated.spec.stages, strict=True):
        assert (a.inputs, a.outputs, a.parameters, a.buffers, a.buckets) == (
            b.inputs,
            b.outputs,
            b.parameters,
            b.buffers,
            b.buckets,
        )
    assert cut.spec.edges == repeated.spec.edges


class UnreadBranch(nn.Module):
    """A branch with parameters whose result nobody returns, computed before and after a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unread = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x))
        side = self.unread[0](h)
        h = self.layers[2](torch.tanh(self.layers[1](h)))
        self.total.add_(torch.tanh(self.unread[1](side)).detach().sum())
        return self.layers[3](h)


def test_parameters_that_no_output_depends_on_have_no_gradient_under_any_cut() -> None:
    x = torch.randn(4, 8)
    model = capture(UnreadBranch, (x,), seed=SEED)
    for stages in (2, 4):
        chain = Chain(model.cut("parameters", stages))
        chain.backward(chain.forward((x,)).sum())
        assert set(chain.gradients()) == {f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
