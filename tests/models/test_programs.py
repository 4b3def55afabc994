"""The programs that ship: they learn, share a batch between replicas, and resume at a step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from stagekit.errors import UserError
from stagekit.examples import digits, gpt, gpt2
from stagekit.program import Program


def small() -> dict[str, Program]:
    return {
        "gpt": gpt.Program(layers=1, width=32, heads=2, sequence=32, batch=8),
        "digits": digits.Program(width=4, batch=32, lr=0.05),
        "gpt2": gpt2.Program(layers=1, width=32, sequence=32, batch=8, lr=3e-3),
        "gpt2 with its loss": gpt2.Program(layers=1, width=32, sequence=32, batch=8, lr=3e-3, loss_inside=True),
    }


@pytest.mark.parametrize("name", small())
def test_a_program_learns(name: str) -> None:
    program = small()[name]
    torch.manual_seed(0)
    model = program.build_model()
    optimizer = program.optimizer(model.named_parameters())
    losses = []
    for batch in itertools.islice(program.batches(0, 0, 1), 30):
        loss = program.loss(model(*batch.args, **batch.kwargs), batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", small())
def test_batches_resume_at_a_step_and_are_shared_by_replicas(name: str) -> None:
    program = small()[name]
    third = next(itertools.islice(program.batches(0, 0, 1), 2, None))
    resumed = next(program.batches(2, 0, 1))
    assert torch.equal(third.target, resumed.target)
    shares = [next(program.batches(2, replica, 3)) for replica in range(3)]
    assert torch.equal(torch.cat([share.target for share in shares]), third.target)
    assert torch.equal(torch.cat([first_tensor(share) for share in shares]), first_tensor(third))


def first_tensor(batch: Any) -> torch.Tensor:
    return batch.args[0] if batch.args else batch.kwargs["input_ids"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", small())
def test_example_inputs_are_one_chunk_of_one_replica(name: str) -> None:
    program = small()[name]
    program.chunks, program.replicas = 2, 2  # type: ignore[attr-defined]
    args, kwargs = program.example_inputs()
    rows = (args[0] if args else kwargs["input_ids"]).shape[0]
    assert rows * 4 == program.batch  # type: ignore[attr-defined]


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="width 30 is not divisible by 4 heads"):
        gpt.Program(width=30)


def test_more_replicas_than_rows_are_refused() -> None:
    with pytest.raises(UserError, match="8 rows can't be shared by 9 replicas"):
        next(small()["gpt"].batches(0, 0, 9))
