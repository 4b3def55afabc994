"""The DDP split: buckets by bytes, equal results, and the behaviours that dynamo's DDPOptimizer is tested for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stagekit.errors import UserError
from stagekit.graph.bucket import backend, split

LAYER = 16 * 16 * 4 + 16 * 4  # bytes of a Linear(16, 16)


class Compiler:
    """Counts and returns graphs as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> fx.GraphModule:
        self.graphs.append(gm)
        return gm


def mlp(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(16, 16), nn.ReLU())))


def traced(module: nn.Module) -> fx.GraphModule:
    """A graph with get_attr parameters and call_function nodes, as older captures have them."""
    return fx.symbolic_trace(module)


def compiled(module: nn.Module, cap_bytes: int, inner: Any = "eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend(cap_bytes=cap_bytes, inner=inner, **options))


def check_same(module: nn.Module, run: Any, *inputs: Tensor, exact: bool = True) -> None:
    """The compiled module gives the outputs and gradients of the plain one."""
    plain = copy.deepcopy(module)
    got, expected = run(*inputs), plain(*inputs)
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-5)
    assert close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    for (name, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or close(a.grad, b.grad), name
    module.zero_grad(set_to_none=True)


def test_each_bucket_is_compiled_once_and_holds_what_the_cap_says() -> None:
    compiler, gm = Compiler(), traced(mlp())
    result = split(gm, [torch.randn(2, 16)], cap_bytes=2 * LAYER, compile_fn=compiler)
    assert len(compiler.graphs) == 2
    assert [b.size_bytes for b in result.report.buckets] == [2 * LAYER, 2 * LAYER]
    assert result.report.buckets[0].parameters == ("6.weight", "6.bias", "4.weight", "4.bias")
    assert [n for n in gm.graph.nodes if n.op == "call_module"], "the caller's graph is untouched"


def test_a_small_model_is_compiled_whole() -> None:
    compiler, gm = Compiler(), traced(mlp())
    result = split(gm, [torch.randn(2, 16)], cap_bytes=100 * LAYER, compile_fn=compiler)
    assert compiler.graphs == [gm]
    assert result.module is gm
    assert "1 bucket(s), cap" in str(result.report)


def test_the_first_bucket_has_its_own_cap() -> None:
    result = split(traced(mlp()), [torch.randn(2, 16)], cap_bytes=100 * LAYER, first_cap_bytes=1, compile_fn=Compiler())
    assert [b.size_bytes for b in result.report.buckets] == [LAYER, 3 * LAYER]


def test_a_cap_of_one_byte_gives_one_parameter_node_per_bucket() -> None:
    result = split(traced(mlp()), [torch.randn(2, 16)], cap_bytes=1, compile_fn=Compiler())
    assert [b.size_bytes for b in result.report.buckets] == [LAYER] * 4


def test_a_cap_below_one_byte_is_refused() -> None:
    with pytest.raises(UserError, match="cap_bytes is 0"):
        split(traced(mlp()), [torch.randn(2, 16)], cap_bytes=0, compile_fn=Compiler())


def test_ignored_and_frozen_parameters_do_not_count() -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    module[0].bias.requires_grad_(False)
    ignored = [module[2].weight, "2.bias"]
    result = split(traced(module), [torch.randn(2, 16)], cap_bytes=LAYER, ignored=ignored, compile_fn=Compiler())
    assert sum(b.size_bytes for b in result.report.buckets) == 2 * LAYER


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_outputs_and_gradients_are_equal_for_each_backend(inner: str) -> None:
    module = mlp(3)
    check_same(module, compiled(module, LAYER, inner), torch.randn(4, 16), exact=inner == "eager")


def test_parameters_that_are_graph_inputs_are_counted() -> None:
    compiler, module = Compiler(), mlp()
    compiled(module, 2 * LAYER, compiler)(torch.randn(2, 16))
    assert len(compiler.graphs) == 2


def test_later_calls_and_other_batch_sizes_compile_at_most_once_more() -> None:
    compiler, module = Compiler(), mlp()
    run = compiled(module, 2 * LAYER, compiler)
    for _ in range(3):
        run(torch.randn(2, 16))
    assert len(compiler.graphs) == 2
    for factor in (2, 3):
        check_same(module, run, torch.randn(2 * factor, 16))
    assert len(compiler.graphs) <= 4, "one recompilation makes the batch size symbolic"


class Operands(nn.Module):
    """Parameters reached by keyword, in a list, through a method and through weight.t()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(16, 16))
        self.b = nn.Parameter(torch.randn(16, 16))
        self.c = nn.Parameter(torch.randn(16, 16))
        self.d = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, weight=self.a)
        x = torch.cat([x, self.b], 0).tanh()
        x = x.matmul(self.c.t())
        return torch.addmm(input=x, mat1=x, mat2=self.d)


@pytest.mark.parametrize("cap", [1, 1500, 10**6])
def test_keyword_nested_method_and_transposed_operands_are_counted(cap: int) -> None:
    module = Operands()
    result = split(traced(module), [torch.randn(2, 16)], cap_bytes=cap, compile_fn=Compiler())
    assert sum(b.size_bytes for b in result.report.buckets) == 4 * 16 * 16 * 4
    x = torch.randn(2, 16)
    assert torch.equal(result.module(x), module(x))
    check_same(module, compiled(module, cap, "aot_eager"), x, exact=False)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(torch.relu(self.layer(x))))


def test_a_shared_or_tied_parameter_counts_once() -> None:
    module = Shared()
    result = split(traced(module), [torch.randn(2, 16)], cap_bytes=1, compile_fn=Compiler())
    assert sum(b.size_bytes for b in result.report.buckets) == LAYER + 16 * 4
    check_same(module, compiled(module, 1, "aot_eager"), torch.randn(2, 16), exact=False)


class Branches(nn.Module):
    """Duplicate inputs, a scalar where, a tuple crossing buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.a(x).split(16, -1)
        return self.b(torch.where(left > 0, right, 0.5) + x + y)


def test_duplicate_inputs_scalar_where_and_tuples_work() -> None:
    module = Branches()
    x = torch.randn(2, 16)
    check_same(module, compiled(module, 1, "aot_eager"), x, x, exact=False)


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return (self.a @ self.a).relu() @ self.b


def test_a_graph_without_inputs_works() -> None:
    module = NoInput()
    check_same(module, compiled(module, 1, "aot_eager"), exact=False)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Dropout(0.5))


def test_compiling_moves_no_statistics_and_draws_no_random_numbers() -> None:
    module = convolutions()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    split(traced(module), [torch.randn(2, 3, 8, 8, generator=torch.Generator())], cap_bytes=1, compile_fn=Compiler())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))


def test_channels_last_strides_survive_between_buckets() -> None:
    module = nn.Sequential(*list(convolutions())[:4]).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    run = compiled(module, 1, "inductor")
    assert run(x).stride() == copy.deepcopy(module)(x).stride()
    module.eval()
    check_same(module, compiled(module, 1, "inductor"), x, exact=False)


def test_autocast_and_no_grad_around_the_net_work() -> None:
    module = mlp()
    run = compiled(module, 1, "aot_eager")
    x = torch.randn(2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(x), module(x))
    with torch.no_grad():
        result = run(x)
    assert not result.requires_grad
    assert torch.allclose(result, module(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def test_checkpoint_regions_stay_whole() -> None:
    import torch.utils.checkpoint

    module = Checkpointed()
    check_same(module, compiled(module, 1, "aot_eager"), torch.randn(2, 16), exact=False)


class Preamble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x * 2).tanh() + 1)


def test_a_parameterless_preamble_joins_the_first_bucket() -> None:
    result = split(traced(Preamble()), [torch.randn(2, 16)], cap_bytes=1, compile_fn=Compiler())
    assert [b.size_bytes for b in result.report.buckets] == [LAYER, LAYER]


def test_the_dump_goes_only_into_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    split(traced(mlp()), [torch.randn(2, 16)], cap_bytes=2 * LAYER, compile_fn=Compiler(), dump_dir=tmp_path / "dump")
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["bucket_0.txt", "bucket_1.txt", "final.txt", "original.txt", "report.txt", "split.txt"]
    assert "float32[2, 16]" in (tmp_path / "dump" / "bucket_0.txt").read_text()
    assert not list(working.iterdir())
