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


def test_modules_that_feed_each_other_directly_count_in_their_own_buckets() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    result = split(traced(module), [torch.randn(2, 16)], cap_bytes=1, compile_fn=Compiler())
    assert [b.size_bytes for b in result.report.buckets] == [LAYER] * 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gm": mlp()}, r"gm is a Sequential; give a torch\.fx\.GraphModule"),
        ({"example_inputs": torch.ones(2, 16)}, "example_inputs is a Tensor; give one value per graph input as a list"),
        ({"example_inputs": []}, r"holds 0 values, but the graph takes 1 \(input_1\); give one per input"),
        ({"compile_fn": "inductor"}, r"compile_fn is 'inductor'; give a function .*backend\(inner="),
        ({"compile_fn": lambda gm, inputs: None}, "compile_fn returned None for the whole graph; return what"),
        ({"compile_fn": lambda gm, inputs: None, "cap_bytes": 1}, "compile_fn returned None for bucket_0; return what"),
        ({"cap_bytes": 0}, "cap_bytes is 0; give bytes"),
        ({"cap_bytes": "25MiB"}, "cap_bytes is '25MiB'; give bytes as a whole number of at least 1"),
        ({"cap_bytes": None}, "cap_bytes is None; give bytes"),
        ({"first_cap_bytes": 0.5}, r"first_cap_bytes is 0\.5; give bytes"),
        ({"ignored": "0.weight"}, "ignored is a str; give a list of parameters, or of their names"),
        ({"ignored": nn.Parameter(torch.ones(2))}, "ignored is a Parameter; give a list"),
        ({"ignored": [3]}, "ignored holds 3; give a list"),
        ({"ignored": ["0.weight", "2.wieght"]}, r"ignored names '2\.wieght', but .* nearest: 2\.weight"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(given: dict[str, Any], words: str) -> None:
    right = {"gm": traced(mlp()), "example_inputs": [torch.ones(2, 16)], "cap_bytes": 1 << 20, "compile_fn": Compiler()}
    with pytest.raises(UserError, match=words):
        split(**(right | given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"inner": "nosuch"},
            "inner='nosuch' is no backend of torch.compile here; there are .*eager, aot_eager, .*inductor",
        ),
        ({"inner": 3}, "inner is 3; name a backend"),
        ({"cap_bytes": 0}, "cap_bytes is 0; give bytes"),
        ({"ignored": "0.weight"}, "ignored is a str"),
    ],
)
def test_a_backend_checks_its_arguments_before_anything_is_compiled(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        backend(**({"cap_bytes": 1} | given))


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


class Attributes(nn.Module):
    """Parameters behind dots, a buffer and a plain tensor reached as attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"deep": nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])})
        self.scale: Tensor
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.inner["deep"]
        x = F.linear(x, layers[0].weight, layers[0].bias) * self.scale
        return F.linear(x, layers[1].weight, layers[1].bias)


def test_dotted_attributes_are_counted_and_buffers_are_not() -> None:
    module, compiler = Attributes(), Compiler()
    x = torch.randn(2, 16)
    result = split(traced(module), [x], cap_bytes=1, compile_fn=compiler)
    assert [b.size_bytes for b in result.report.buckets] == [LAYER, LAYER]
    assert result.report.buckets[0].parameters == ("inner.deep.1.weight", "inner.deep.1.bias")
    assert torch.equal(result.module(x), module(x))


def test_the_node_that_opens_a_bucket_counts_in_it() -> None:
    result = split(traced(mlp(3)), [torch.randn(2, 16)], cap_bytes=LAYER + 1, compile_fn=Compiler())
    assert [b.size_bytes for b in result.report.buckets] == [2 * LAYER, LAYER]


class Unread(nn.Module):
    """Its last operations make nothing that anyone needs; so do some in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.b(x)
        y = self.c(x)
        self.b(y)
        return y


def test_no_bucket_is_without_an_output_that_someone_needs() -> None:
    module, compiler = Unread(), Compiler()
    x = torch.randn(2, 16)
    result = split(traced(module), [x], cap_bytes=1, compile_fn=compiler)
    for graph in compiler.graphs:
        assert next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert sum(b.size_bytes for b in result.report.buckets) == 3 * LAYER
    assert torch.equal(result.module(x), module(x))


def test_batchnorm_statistics_move_once_per_call_in_training() -> None:
    module = nn.Sequential(*list(convolutions())[:4], nn.BatchNorm2d(8))
    plain = copy.deepcopy(module)
    run = compiled(module, 1, "aot_eager")
    for _ in range(2):
        x = torch.randn(2, 3, 8, 8)
        run(x)
        plain(x)
    for (name, got), expected in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(got, expected, atol=1e-6), name
    assert module[1].num_batches_tracked == 2


class WritesAcross(nn.Module):
    """Values made in one bucket are written in place in the next, where a view of them is alive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 1.0
        view = x.view(-1)
        x.add_(self.b(x).detach())
        return self.c(x) + view.view(x.shape)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_value_written_in_another_bucket_is_seen_through_its_views(inner: str) -> None:
    module = WritesAcross()
    check_same(module, compiled(module, 1, inner), torch.randn(2, 16), exact=False)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, options: dict[str, Tensor], factor: float = 2.0) -> dict[str, Any]:
        hidden = self.a(x) * options["scale"] * factor
        return {"hidden": hidden, "out": self.b(hidden), "same": x}


def test_keywords_dicts_and_outputs_that_are_inputs_work_behind_torch_compile() -> None:
    module = Keywords()
    x, scale = torch.randn(2, 16), torch.randn(16)
    got = compiled(module, 1, "aot_eager")(x, options={"scale": scale}, factor=3.0)
    expected = module(x, options={"scale": scale}, factor=3.0)
    assert got["same"] is x
    assert all(torch.allclose(got[name], expected[name], atol=1e-6) for name in ("hidden", "out"))


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.b(torch.relu(self.b(x)))
        with torch.no_grad():
            scale = self.c(x.float()).abs().mean()
        return self.c(x.float()) * scale


def test_regions_inside_the_net_stay_within_one_bucket() -> None:
    module = AutocastInside()
    x = torch.randn(2, 16)
    run = compiled(module, 1, "aot_eager")
    assert torch.allclose(run(x), module(x), atol=1e-2)
    check_same(module, compiled(module, 1, "eager"), x)


def test_ignored_parameters_are_those_that_ddp_was_told_to_ignore() -> None:
    module, compiler = mlp(), Compiler()
    for parameter in module[2].parameters():
        parameter._ddp_ignored = True  # type: ignore[union-attr]
    compiled(module, 2 * LAYER, compiler)(torch.randn(2, 16))
    assert len(compiler.graphs) == 2
    result = split(traced(module), [torch.randn(2, 16)], cap_bytes=2 * LAYER, compile_fn=Compiler())
    assert sum(b.size_bytes for b in result.report.buckets) == 3 * LAYER


def test_operations_that_must_run_eagerly_part_a_bucket() -> None:
    module, compiler = mlp(2), Compiler()
    gm = traced(module)
    x = torch.randn(2, 16)
    first_relu = next(node for node in gm.graph.nodes if str(node.target) == "1")
    result = split(gm, [x], cap_bytes=10**6, compile_fn=compiler, runs_eagerly=lambda node: node is first_relu)
    assert [sum(n.op == "call_module" for n in graph.graph.nodes) for graph in compiler.graphs] == [1, 2]
    assert len(result.report.buckets) == 1
    assert torch.equal(result.module(x), module(x))


class Gated(nn.Module):
    """BatchNorm, an autocast region, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            h = h + self.second(h)
        if h.mean() > 100:
            return h
        result: Tensor = self.second(h)
        return result


def test_floats_that_dynamo_passes_as_inputs_do_not_keep_a_graph_from_being_compiled() -> None:
    torch.manual_seed(0)
    module, inner = Gated(), Compiler()
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend(cap_bytes=200, inner=inner), dynamic=True)
    check_same(module, run, torch.randn(8, 6))
    assert len(inner.graphs) == 3  # two buckets before the branch, one behind it
