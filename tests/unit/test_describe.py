"""A job that can't be planned: which field of the job file the message is about."""

from __future__ import annotations

import pytest
from torch import nn

from stagekit.describe import failure, training_notes
from stagekit.errors import CaptureError, SplitError, UserError, WeightsError
from stagekit.plan.plan import make_plan
from stagekit.testing import ChainSource

LFS = "/models/a/model.safetensors is a git-lfs pointer"


@pytest.mark.parametrize(
    ("error", "spec", "field", "text"),
    [
        (WeightsError(f"weights: {LFS}"), {"weights": "/models/a"}, "weights", LFS),
        (WeightsError(f"weights: {LFS}"), {"weights": None, "program": "hf:/models/a"}, "program", LFS),
        (UserError("params.sequence is 64, but 32 is most"), {}, "params.sequence", "64, but 32 is most"),
        (UserError("params.data: can't read /x"), {}, "params.data", "can't read /x"),
        (UserError("params.data names no file"), {}, "params.data", "names no file"),
        (UserError("params: got an unexpected argument 'lr'"), {}, "params", "got an unexpected argument 'lr'"),
        (UserError("compile='x' is no backend"), {}, "pipeline.compile", "compile='x' is no backend"),
        (SplitError("split: no module 'x'"), {}, "pipeline.split", "split: no module 'x'"),
        (SplitError("no cut fits the memory cap"), {}, "pipeline.balance.memory", "no cut fits the memory cap"),
        (CaptureError("a branch on values"), {}, "program", "a branch on values"),
        (ZeroDivisionError("in the model"), {}, "program", "ZeroDivisionError: in the model"),
    ],
)
def test_an_error_is_told_at_the_field_that_must_change(
    error: Exception, spec: dict[str, str | None], field: str, text: str
) -> None:
    document = failure(error, spec)
    assert (document["field"], document["error"]) == (field, text)


def test_a_plan_tells_a_whole_steps_time_and_what_half_precision_makes_of_bit_equality() -> None:
    source = ChainSource([nn.Linear(2, 2), nn.Linear(2, 2)], 2, 1)
    plan = make_plan(source.spec, schedule="gpipe", num_chunks=2)
    step_ms = 3 * plan.timeline.makespan * 1e3
    assert training_notes({"accumulate": 1, "precision": "fp32"}, plan) == []
    batches, precision = training_notes({"accumulate": 3, "precision": "bf16"}, plan)
    assert batches == f"times are those of one batch; a step is 3 of them (train.accumulate): {step_ms:.1f} ms"
    assert precision.endswith("those of one process under the same bf16 autocast")


def test_the_line_that_is_shown_is_the_users_and_none_of_pythons_own() -> None:
    import json

    try:
        json.loads("{")
    except ValueError as error:
        assert failure(error, {})["where"].startswith(__file__)
