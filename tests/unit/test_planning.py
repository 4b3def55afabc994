"""What may be left open, told in words where it can't be; the example's size follows the chunk count."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stagekit.api import plan_pipeline
from stagekit.errors import ScheduleError, SplitError, UserError
from stagekit.graph.capture.capture import Captured, capture
from stagekit.plan.decision import Decision, decision_of
from stagekit.plan.plan import Plan
from stagekit.plan.split import Balanced
from stagekit.planning import Question, answer, at_chunks, chunks_to_compare, compared, cut_for, open_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


@functools.cache
def captured() -> Captured:
    return capture(Model, (torch.zeros(8, 16),), check=False)


@pytest.mark.parametrize(
    ("schedule", "stages", "per_rank", "ranks", "found"),
    [("1f1b", 4, 1, None, None), ("auto", 4, 1, None, 4), ("auto", 4, 2, None, 2), ("gpipe", None, "auto", 3, 3)],
)
def test_the_ranks_follow_from_what_is_given(
    schedule: str, stages: int | None, per_rank: Any, ranks: int | None, found: int | None
) -> None:
    assert open_ranks(schedule, stages, per_rank, ranks) == found


@pytest.mark.parametrize(
    ("schedule", "stages", "per_rank", "ranks", "told"),
    [
        ("1f1b", None, 1, None, 'give stages, or ranks together with stages_per_rank="auto"'),
        ("1f1b", 4, 1, 4, "give stages, or ranks"),
        ("auto", 4, "auto", None, "give ranks, not stages"),
        ("auto", 4, "auto", 4, "give ranks, not stages"),
        ("auto", 4, [2, 2], None, 'schedule="auto" takes a whole number, or "auto"'),
        ("auto", 0, 1, None, "stages is 0; give a whole number of at least 1"),
        ("auto", None, "auto", True, "ranks is True; give a whole number"),
        ("auto", 4, 3, None, "stages 4, stages_per_rank 3"),
    ],
)
def test_counts_that_leave_the_ranks_open_or_say_them_twice_are_refused(
    schedule: str, stages: Any, per_rank: Any, ranks: Any, told: str
) -> None:
    with pytest.raises(UserError) as error:
        open_ranks(schedule, stages, per_rank, ranks)
    assert told in str(error.value)


def test_the_example_follows_the_chunk_count() -> None:
    assert [at_chunks(captured(), 4, m).symbols.symbols[0].example for m in (2, 4, 8)] == [16, 8, 4]
    with pytest.raises(SplitError, match="no batch dimension that 5 chunks divide"):
        at_chunks(captured(), 4, 5)
    assert chunks_to_compare(captured(), 4, 4) == (4, 8, 16, 32)


def test_a_model_of_one_size_can_not_have_its_chunks_chosen() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(8, 16) * torch.ones(8, 16, requires_grad=True)

    with pytest.raises(
        UserError, match=r"chunks: auto needs a model that takes chunks of other sizes .*; write a number"
    ):
        chunks_to_compare(capture(Fixed, (torch.zeros(8, 16),), check=False), 4, 4)


def test_costs_without_measuring_still_rank_and_cut() -> None:
    found = answer(captured(), Question("balanced", 2, None, chunks=8), measured=False)
    assert len(found.choice.begins) == 2 and not found.choice.costs
    assert "together on flops" in found.choice.report


def test_a_memory_cap_and_speeds_reach_the_choice() -> None:
    wish = Balanced("flops", memory_bytes=1 << 20, speeds=(1.0, 3.0))
    made = cut_for(captured(), Question(wish, 2, None, chunks=(4, 8)), buckets=None)
    assert "speeds 1, 3" in made.cut.spec.split_report and "of 1 MiB" in made.cut.spec.split_report
    assert len(made.cut.spec.stages[0].parameters) < len(made.cut.spec.stages[1].parameters)
    with pytest.raises(SplitError, match="no plan fits the memory cap of 4 KiB"):
        cut_for(captured(), Question(Balanced("flops", memory_bytes=4096), 2, None, chunks=4), buckets=None)


def test_module_paths_stay_where_they_are_and_only_the_schedule_is_chosen() -> None:
    made = cut_for(captured(), Question(["blocks.4"], 2, None, chunks=4), buckets=None)
    assert made.cut.spec.stages[1].begins_at == "blocks.4" and made.ranking is not None


def test_several_stages_of_a_rank_are_cut_for_their_schedule_where_costs_are_measured() -> None:
    made = cut_for(captured(), Question("balanced", 4, None, "zb-v", 2, 8), buckets=None)
    assert (made.schedule, made.num_chunks, made.stages_per_rank, made.ranking) == ("zb-v", 8, 2, None)
    assert made.cut.spec.split_report.startswith("cut for zb-v, 2 stages per rank, 8 chunks on measured costs: ")
    counted = cut_for(captured(), Question("balanced:flops", 4, None, "zb-v", 2, 8), buckets=None)
    assert "largest rank" in counted.cut.spec.split_report
    forward = cut_for(captured(), Question("balanced", 4, None, "forward", 2, 8), buckets=None)
    assert "largest rank" in forward.cut.spec.split_report


def test_a_schedule_that_can_not_run_the_numbers_is_refused_as_before() -> None:
    with pytest.raises(ScheduleError, match="1f1b runs one stage per rank"):
        cut_for(captured(), Question("balanced", 4, None, "1f1b", 2, 8), buckets=None).plan(
            replicas=1, compile="eager", recompute=False
        )
    with pytest.raises(SplitError, match=r"^40 stages need 39 cuts, but the model has only 11 legal ones"):
        cut_for(captured(), Question("balanced", 40, None, "interleaved", 2, 8), buckets=None)


@pytest.mark.parametrize(
    ("per_rank", "split"), [([2, 1], ["blocks.2", "blocks.4"]), (5, [f"blocks.{i}" for i in range(1, 5)])]
)
def test_a_plan_whose_module_paths_make_its_own_number_of_stages_alone_is_compared_with_what_else_can_be(
    per_rank: Any, split: list[str]
) -> None:
    stages = len(split) + 1
    pipe = plan_pipeline(
        captured(), loss_fn=F.mse_loss, stages=stages, chunks=4, split=split, stages_per_rank=per_rank, schedule="gpipe",
        measured=False,
    )  # fmt: skip
    ranking = compared(captured(), Question(split, stages, None, chunks=4), pipe.plan)
    assert ranking.winner.candidate.schedule == "gpipe"


@pytest.mark.parametrize("per_rank", [1, 2])
def test_a_plan_is_compared_at_the_costs_that_were_measured_for_its_cut(per_rank: int) -> None:
    pipe = plan_pipeline(
        captured(), loss_fn=F.mse_loss, stages=2 * per_rank, chunks=4, stages_per_rank=per_rank, schedule="gpipe"
    )
    question = Question("balanced", 2 * per_rank, None, chunks=4)
    first, again = (compared(captured(), question, pipe.plan, pipe.node_costs) for _ in range(2))
    assert pipe.node_costs
    assert [each.step_s for each in first.best] == [each.step_s for each in again.best]


def test_a_schedule_file_is_each_ranks_own_and_another_one_is_told_apart(tmp_path: Path) -> None:
    for folder, first in (("there", "0F0,0F1,0B0,0B1"), ("here", "0F0,0F1,0B0,0B1"), ("other", "0F0,0B0,0F1,0B1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.csv").write_text(f"{first}\n1F0,1B0,1F1,1B1\n")

    def planned(folder: str, decided: Decision | None = None, name: str = "mine.csv") -> Plan:
        file = str(tmp_path / folder / name)
        return plan_pipeline(
            captured(), loss_fn=F.mse_loss, stages=2, chunks=2, schedule=file, measured=False, decided=decided
        ).plan

    plan = planned("there")
    decided = Decision.from_json(decision_of(plan).to_json())
    (tmp_path / "there" / "mine.csv").unlink()
    told = {folder: planned(folder, decided).fingerprint for folder in ("here", "other")}
    assert told["here"] == plan.fingerprint != told["other"]
    with pytest.raises(UserError, match=r"rank 0 runs the schedule file mine.csv, this rank was given .*yours.csv"):
        planned("here", decided, "yours.csv")
