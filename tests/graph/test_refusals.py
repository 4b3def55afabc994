"""What can't be captured is refused with the user's line and what to do; nothing of the user changes by it."""

from __future__ import annotations

import copy
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError
from stagekit.graph.capture.capture import capture

LINE = rf'at "{__file__}", line \d+'


class Model(nn.Module):
    """Runs the function that a test gives between two layers."""

    def __init__(self, middle: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = middle
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.middle(self, self.first(x), x))


class Returns(Model):
    """Returns what the given function makes of its two layers' outputs."""

    def forward(self, x: Tensor) -> Any:
        return self.middle(self.first(x), self.second(x))


def x_of() -> Tensor:
    return torch.randn(4, 6)


def branch(model: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:
        return h * 2
    return h


def branch_around_a_view(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.view(-1, 6) if h.sum() > 0 else h


def distribution(model: Any, h: Tensor, x: Tensor) -> Tensor:
    checked = torch.distributions.Normal(
        h, 1.0, validate_args=True
    )  # the default, until torch.compile ran in the process
    return checked.rsample()  # type: ignore[no-any-return]


def drop_layer(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.3 else h


def drop_layer_by_python(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return x if random.random() < 0.3 else h


def drop_layer_by_numpy(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return x if numpy.random.rand() < 0.3 else h


def item(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * x.abs().max().item()


def listed(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * sum(x[:, 0].tolist())


def selected(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h[x[:, 0] > 0]


def nonzero(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h[(x[:, 0] > 0).nonzero().squeeze(1)]


def to_numpy(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.from_numpy(numpy.sin(x.detach().numpy()))


def packed(model: Any, h: Tensor, x: Tensor) -> Tensor:
    sequences = nn.utils.rnn.pack_padded_sequence(h[:, None].expand(-1, 2, -1), [2, 2, 1, 1], batch_first=True)
    return model.recurrent(sequences)[1][0][0]  # type: ignore[no-any-return]


def averaged(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return model.norm(h)  # type: ignore[no-any-return]


def counts_in_a_tensor(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.seen += 1
    return h * model.seen  # type: ignore[no-any-return]


def assigns_data(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.first.weight.data = model.first.weight.data * 2
    return h


def detaches_by_data(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * h.data.mean() + model.second.weight.data.sum()  # type: ignore[no-any-return]


def writes_data(model: Any, h: Tensor, x: Tensor) -> Tensor:
    h.data.mul_(2)
    return h


def hooked(model: Any, h: Tensor, x: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def gradient(model: Any, h: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(h.pow(2).sum(), h, create_graph=True)
    return found


def mapped(model: Any, h: Tensor, x: Tensor) -> Any:
    return torch.vmap(lambda row: row * row.sum())(h)


def counted(model: Any, h: Tensor, x: Tensor) -> Tensor:
    model.calls += 1
    return h * model.calls  # type: ignore[no-any-return]


def remembered(model: Any, h: Tensor, x: Tensor) -> Tensor:
    result = h + model.last
    model.last = h.detach()
    return result


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (branch, rf"{LINE}, in branch \(if h\.sum\(\) > 0:\): it decides on a value.*torch\.where"),
        (branch_around_a_view, rf"{LINE}, in branch_around_a_view \(return h\.view.*\): it decides on a value"),
        (distribution, rf"{LINE}, in distribution .*pass validate_args=False to the distribution"),
        (drop_layer, rf"{LINE}, in drop_layer .*decides on a value"),
        (drop_layer_by_python, r"draws random numbers from Python's random module.*random mask"),
        (drop_layer_by_numpy, r"draws random numbers from numpy\.random"),
        (item, rf"depends on data {LINE}, in forward.*\.item\(\).*keep values in tensors"),
        (listed, rf"depends on data {LINE}, in forward"),
        (selected, rf"depends on data {LINE}, in forward.*mask instead of selecting"),
        (nonzero, rf"depends on data {LINE}, in forward"),
        (to_numpy, rf"{LINE}, in to_numpy .*leaves torch for NumPy.*custom_op"),
        (hooked, rf"gradient hook is registered on a tensor {LINE}, in hooked.*autograd\.Function"),
        (gradient, rf"gradients are computed inside forward {LINE}, in gradient"),
        (mapped, rf"torch\.vmap or torch\.func {LINE}, in forward"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_the_line(middle: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(middle), (x_of(),), check=False)


def size_as_tensor(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.view(torch.div(h.size(0), 2, rounding_mode="trunc"), 2, 6).flatten(0, 1)  # type: ignore[call-overload, no-any-return]


def converts_a_layer(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return model.first.to(torch.float64)(h.double()).float()  # type: ignore[no-any-return]


def doubles_a_layer(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return model.first.double()(h.double()).float()  # type: ignore[no-any-return]


def retypes_a_layer(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return model.first.type(torch.float64)(h.double()).float()  # type: ignore[no-any-return]


def draws_up_to_infinity(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.empty_like(h).random_(3, None)


@pytest.mark.parametrize(
    ("middle", "attributes", "message"),
    [
        (packed, {"recurrent": nn.LSTM(6, 6, batch_first=True)}, r"pack_padded_sequence.*mask its outputs"),
        (averaged, {"norm": nn.BatchNorm1d(6, momentum=None)}, r"norm is a BatchNorm with momentum=None"),
        (counts_in_a_tensor, {"seen": torch.zeros(6)}, r"seen of Model is written.*register it as a buffer"),
        (size_as_tensor, {}, rf"{LINE}, in forward.*torch\.div.*compute sizes with Python's //"),
        (converts_a_layer, {}, rf"Linear\.to\(\) changes weights in forward {LINE}"),
        (doubles_a_layer, {}, rf"Linear\.double\(\) changes weights in forward {LINE}"),
        (retypes_a_layer, {}, rf"Linear\.type\(\) changes weights in forward {LINE}"),
        (draws_up_to_infinity, {}, rf"random_\(3, None\) can't be captured {LINE}"),
        (assigns_data, {}, rf"\.data of a tensor is assigned in forward {LINE}, in assigns_data"),
    ],
)
def test_what_needs_other_words_says_what_to_do_and_prints_nothing(
    middle: Any, attributes: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(middle, **attributes), (x_of(),))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("middle", [detaches_by_data, writes_data])
def test_data_of_a_tensor_is_the_tensor_without_gradient(middle: Any) -> None:
    assert capture(Model(middle), (x_of(),)).self_check == "values"


def converts_to_what_it_is(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return model.first.float().cpu().to(torch.float32)(h)  # type: ignore[no-any-return]


def random_integers(model: Any, h: Tensor, x: Tensor) -> Tensor:
    a, b = torch.empty_like(h).random_(0, 5), torch.empty_like(h).random_(to=7, **{"from": 3})
    return h * a * b + torch.empty_like(h).random_(2) + (torch.zeros_like(x, dtype=torch.uint8).random_() & 1)


@pytest.mark.parametrize("middle", [converts_to_what_it_is, random_integers])
def test_conversions_that_change_nothing_and_random_integers_between_bounds_are_captured(middle: Any) -> None:
    assert capture(Model(middle), (x_of(),)).self_check == "values"


@pytest.mark.parametrize(("middle", "attributes"), [(counted, {"calls": 0}), (remembered, {"last": torch.zeros(4, 6)})])
def test_state_outside_of_buffers_that_changes_the_output_is_found_in_a_second_call(
    middle: Any, attributes: Any
) -> None:
    with pytest.raises(CaptureError, match=r"in a second call, output 0 differs.*state kept outside"):
        capture(Model(middle, **attributes), (x_of(),))


@pytest.mark.parametrize(
    ("number", "shown"),
    [(lambda x: x.shape[0], "args[0].shape[0]"), (lambda x: 2 * x.shape[0] + 1, "2*args[0].shape[0] + 1")],
)
def test_a_number_of_rows_among_the_outputs_is_refused_by_its_key(number: Any, shown: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return {"out": self.layer(x), "stats": {"rows": number(x)}}

    captured = capture(Counts(), (x_of(),))
    with pytest.raises(CaptureError, match=r"returns output\['stats'\]\['rows'\], a number.*: " + re.escape(shown)):
        captured.cut("balanced", 1)


def doubled_when_compiled(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.compiler.is_compiling() else h


def doubled_when_dynamo_compiles(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch._dynamo.is_compiling() else h


def doubled_when_exported(model: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.compiler.is_exporting() else h


@pytest.mark.parametrize(
    ("middle", "asked"),
    [
        (doubled_when_compiled, r"torch\.compiler\.is_compiling"),
        (doubled_when_dynamo_compiles, r"torch\._dynamo\.is_compiling"),
        (doubled_when_exported, r"torch\.compiler\.is_exporting"),
    ],
)
def test_a_model_that_computes_something_else_when_compiled_is_told_where_it_asks(middle: Any, asked: str) -> None:
    with pytest.raises(CaptureError, match=rf"output 0 differs.*forward asks {asked}\(\) {LINE}, in {middle.__name__}"):
        capture(Model(middle), (x_of(),))


@torch.library.custom_op("stagekit_tests::noisy_backward", mutates_args=())
def noisy_backward(x: Tensor) -> Tensor:
    return x * 2


noisy_backward.register_fake(torch.empty_like)
noisy_backward.register_autograd(lambda ctx, grad: grad * torch.rand_like(grad))


def test_an_operator_whose_backward_draws_is_refused_with_where_to_draw() -> None:
    with pytest.raises(CaptureError, match=r"gradient of first\.\w+ differs.*random numbers.*in its forward"):
        capture(Model(lambda model, h, x: noisy_backward(h)), (x_of(),))


def test_example_inputs_on_the_meta_device_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is on the meta device.*torch\.zeros\(\(4, 6\)"):
        capture(Model(lambda model, h, x: h), (torch.empty(4, 6, device="meta"),))


def with_hook(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    if kind == "module":
        model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    elif kind == "parameter":
        model[1].weight.register_hook(lambda grad: grad * 2)
    else:
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def sparse() -> nn.Module:
    model = Model(lambda model, h, x: h)
    model.table = nn.Parameter(torch.eye(6).to_sparse())
    return model


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_hook("module"), "0 has a backward hook"),
        (lambda: with_hook("parameter"), r"1\.weight has a gradient hook"),
        (lambda: with_hook("after"), r"1\.weight has a gradient hook"),
        (lambda: nn.Sequential(nn.LazyLinear(6)), r"0\.weight has no shape yet"),
        (lambda: torch.jit.script(nn.Linear(6, 6)), "TorchScript"),
        (lambda: nn.DataParallel(nn.Linear(6, 6)), r"wrapped in DataParallel; pass the module inside"),
        (sparse, r"table is a torch\.sparse_coo tensor"),
        (lambda: nn.Sequential(nn.Embedding(5, 6, sparse=True)), "0 makes sparse gradients"),
        (lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 6))), "0 is quantised"),
        (lambda: Returns(lambda a, b: (a, threading.Lock())), "returns a _thread.lock; return tensors"),
    ],
)
def test_modules_that_would_train_otherwise_in_stages_are_refused(build: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(build(), (x_of(),), check=False)


def test_nothing_of_the_user_changes_while_a_model_is_refused() -> None:
    model = Model(drop_layer_by_python)
    before, python, torchs = copy.deepcopy(model.state_dict()), random.getstate(), torch.get_rng_state()
    hook, grad = Tensor.register_hook, torch.autograd.grad
    with pytest.raises(CaptureError):
        capture(model, (x_of().clone(),), check=False)
    assert random.getstate() == python
    assert (Tensor.register_hook, torch.autograd.grad) == (hook, grad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(torchs) == len(torch.get_rng_state())
