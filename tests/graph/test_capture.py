"""Capturing leaves the model alone, says sizes as symbols, and refuses loudly what it can't represent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagekit.errors import CaptureError, ShapeError
from stagekit.graph.capture.capture import capture
from stagekit.graph.capture.selfcheck import check_structure
from stagekit.graph.capture.specs import Replicate, Split, flatten_named


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, flag: bool = True) -> Tensor:
        x = self.norm(self.layer(x))
        return x * mask if flag and mask is not None else x


def test_module_inputs_and_generator_are_left_as_they_were() -> None:
    module, x = Masked(), torch.randn(4, 6)
    before, x_before, state = copy.deepcopy(module.state_dict()), x.clone(), torch.get_rng_state()
    captured = capture(module, (x,))
    assert captured.self_check == "values"
    assert torch.equal(x, x_before)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert all(p.grad is None for p in module.parameters())
    again = capture(module, (x,))
    assert again.graph_hash == captured.graph_hash


def test_the_batch_and_the_sequence_are_symbols_also_when_their_sizes_agree() -> None:
    captured = capture(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), (torch.zeros(4, 4, dtype=torch.int64),))
    batch, sequence = captured.symbols.symbols
    assert captured.inputs[0].tensor is not None
    assert captured.inputs[0].tensor.shape == (batch.name, sequence.name)
    assert (batch.is_batch, sequence.is_batch) == (True, False)
    assert (batch.minimum, batch.example) == (1, 4)


def test_a_chunk_of_one_row_still_captures_a_symbolic_batch() -> None:
    captured = capture(nn.Linear(6, 6), (torch.randn(1, 6),))
    assert captured.inputs[0].tensor is not None
    assert captured.inputs[0].tensor.shape == ("s0", 6)
    assert captured.symbols.symbols[0].example == 1


def test_a_value_without_the_batch_goes_whole_to_every_chunk() -> None:
    captured = capture(Masked(), (torch.randn(4, 6), torch.ones(6)))
    assert [given.split_dim for given in captured.inputs] == [0, None]


def test_a_doubtful_argument_is_refused_by_name_until_its_spec_is_said() -> None:
    x, mask = torch.randn(6, 6), torch.ones(6, 6)

    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x @ mask

    doubtful = torch.ones(3, 6)
    with pytest.raises(ShapeError, match=r"kwargs\['mask'\] has shape \(3, 6\).*6 rows.*Split\(dim\) or Replicate"):
        capture(Two(), (x,), {"mask": doubtful.T.contiguous().T})
    captured = capture(Two(), (torch.randn(4, 6),), {"mask": mask}, kwargs_spec={"mask": Replicate()})
    assert captured.inputs[1].split_dim is None
    with pytest.raises(ShapeError, match="kwargs_spec names 'other'"):
        capture(Two(), (x,), {"mask": mask}, kwargs_spec={"other": Split(0)})


def test_a_failing_forward_names_the_line_of_the_user() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(99, 2)

    with pytest.raises(CaptureError, match=rf'Fails can\'t be captured at "{__file__}", line \d+, in forward'):
        capture(Fails(), (torch.randn(4, 6),))


def test_a_branch_on_values_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="Branches can't be captured"):
        capture(Branches(), (torch.randn(4, 6),))


def test_a_size_that_depends_on_data_is_refused() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    with pytest.raises(CaptureError, match="depends on data"):
        capture(Selects(), (torch.randn(4, 6),), check=False)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 7


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(self.layer(x))  # type: ignore[no-any-return]


def test_a_custom_backward_is_kept() -> None:
    captured = capture(Custom(), (torch.randn(4, 6),))
    assert captured.self_check == "values"
    assert [node.name for node in captured.graph.nodes if node.op == "call_function"] == ["linear", "doubled"]


def test_the_structural_check_accepts_a_custom_backward_that_was_kept_and_refuses_one_that_was_lost() -> None:
    x = torch.randn(4, 6)
    leaves = flatten_named((x,), {})[0]
    check_structure(capture(Masked(), (x,), check=False), leaves)
    captured = capture(Custom(), (x,), check=False)
    check_structure(captured, leaves)
    for node in captured.graph.nodes:
        if node.name == "doubled":
            node.replace_all_uses_with(node.args[0])
            captured.graph.erase_node(node)
    with pytest.raises(CaptureError, match=r"_Doubled.*its backward would be lost"):
        check_structure(captured, leaves)


def test_burned_in_constants_and_structure_are_checked() -> None:
    captured = capture(Masked(), (torch.randn(4, 6),), {"flag": True})
    assert len(captured.flatten_inputs((torch.randn(3, 6),), {"flag": True})) == 2
    assert captured.flatten_inputs((None,), {"flag": True})[0] is None
    with pytest.raises(ShapeError, match=r"kwargs\['flag'\] is False, but True was burned in"):
        captured.flatten_inputs((torch.randn(3, 6),), {"flag": False})
    with pytest.raises(ShapeError, match="pass the same structure"):
        captured.flatten_inputs((torch.randn(3, 6),), {})


def test_cuda_without_a_cuda_build_is_refused() -> None:
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        assert capture(nn.Linear(6, 6), (torch.randn(4, 6),), device="cuda", check=False).device == "cuda"
        return
    with pytest.raises(CaptureError, match="built without CUDA"):
        capture(nn.Linear(6, 6), (torch.randn(4, 6),), device="cuda")


class DoublesEverySecond(nn.Module):
    """Writes in place into a view with gaps that nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        every_second = self.a(x)[:, ::2]
        return self.b(every_second.mul_(2))


def test_a_functional_twin_that_is_laid_out_otherwise_is_described_anew() -> None:
    captured = capture(DoublesEverySecond(), (torch.randn(4, 6),))
    (twin,) = [node for node in captured.graph.nodes if str(node.target) == "aten.mul.Tensor"]
    described = captured.symbols.spec(twin.meta["val"])
    assert (described.shape, described.stride) == (("s0", 3), (3, 1))
    assert twin.meta["requires_grad"] and twin.meta["reached"]
