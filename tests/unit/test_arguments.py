"""What `stagekit.pipeline` is given wrongly is told by its name, before anything is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stagekit
from stagekit.arguments import bucket_rule
from stagekit.errors import StagekitError, UserError
from stagekit.graph.buckets.rule import BucketRule


class Returns(nn.Module):
    """Trains a layer and returns something else."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(4, 4), output

    def forward(self, x: torch.Tensor) -> Any:
        self.layer(x)
        return self.output


def unbuilt() -> nn.Module:
    raise AssertionError("the model was built before its arguments were checked")


UNBUILT: dict[str, Any] = {"model": unbuilt}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "stages as text": ({"stages": "2"}, "stages is '2'; give a whole number"),
    "half a chunk": ({"chunks": 1.5}, r"chunks is 1\.5; give a whole number"),
    "chunks to choose": (
        {**UNBUILT, "chunks": "auto"},
        'chunks is "auto"; give a whole number of at least 1: only a job',
    ),
    "a misspelt choice": ({**UNBUILT, "stages_per_rank": "Auto"}, 'one such number per rank, or "auto" with ranks'),
    "a misspelt automatic schedule": ({**UNBUILT, "schedule": "Auto"}, 'unknown \\(did you mean "auto"\\?\\)'),
    "interleaved blocks": (
        {**UNBUILT, "stages": 4, "stages_per_rank": [2, 2], "schedule": "interleaved"},
        "these lie on ranks \\[0, 0, 1, 1\\]; use stages_per_rank: 2, or gpipe or bfs",
    ),
    "no replica": ({"replicas": 0}, "replicas is 0; give a whole number"),
    "a large seed": ({"seed": 2**70}, "seed is .*; give a whole number from 0"),
    "compile: yes": ({"compile": True}, "compile is True; name a compiler"),
    "a loss of another kind": ({**UNBUILT, "loss_fn": 0.5}, "loss_fn is 0.5; give a function"),
    "no loss": ({**UNBUILT, "schedule": "1f1b", "loss_fn": None}, "loss_fn is None, but schedule"),
    "split by number": ({"split": [2]}, r"split is \[2\]; give"),
    "split of nothing": ({"split": None}, "split is None; give"),
    "a misspelt bucket": ({"buckets": {"caps": 100}}, "buckets is .*'caps'.*; give"),
    "an unknown compression": ({"buckets": {"compress": "int8"}}, "compress is 'int8'; give 'bf16'"),
    "an unknown precision": ({"precision": "amp"}, "precision is 'amp'; give 'fp32', 'bf16', 'fp16'"),
    "a bucket without a cap": ({"buckets": {"first": 100}}, "buckets is .*; give"),
    "half a byte": ({"buckets": {"cap": 100.5}}, r"buckets: cap is 100\.5; give bytes"),
    "no size of a bucket": ({"buckets": {"cap": "lots"}}, "buckets: cap: 'lots' is no size"),
    "a misspelt split": ({**UNBUILT, "split": "balancd"}, "split is 'balancd'; use"),
    "a bucket of no size": ({**UNBUILT, "split": "bucket:"}, "split is 'bucket:'; use"),
    "too few speeds": (
        {**UNBUILT, "split": stagekit.Balanced(speeds=(1.0,))},
        "speeds names 1 ranks, but 2 stages run on 2; give one number per rank",
    ),
    "a misspelt schedule": (
        {**UNBUILT, "schedule": "1f2b"},
        'schedule "1f2b" is unknown \\(did you mean "1f1b"\\?\\); there are gpipe, 1f1b',
    ),
    "a V of single stages": ({**UNBUILT, "schedule": "zb-v"}, "use stages_per_rank: 2"),
    "a spec by letter": ({"args_spec": ["x"]}, r"args_spec\[0\] is 'x'; give Split\(dim\), Replicate\(\) or None"),
    "a spec as text": ({"args_spec": "x"}, "args_spec is 'x'; give one spec per positional argument"),
    "a class for a spec": ({"args_spec": [stagekit.Split]}, r"args_spec\[0\] is the class Split; give Split\(dim\)"),
    "a dim by letter": ({"args_spec": [stagekit.Split("x")]}, r"args_spec\[0\] is Split\(dim='x'\); dim is the number"),
    "keyword specs as a list": ({"kwargs_spec": ["x"]}, r"kwargs_spec is \['x'\]; give specs by keyword"),
    "a keyword spec by letter": ({"kwargs_spec": {"x": 1}}, r"kwargs_spec\['x'\] is 1; give Split"),
    "a class for a rule": ({"output_spec": stagekit.Cat}, r"output_spec holds the class Cat; make one of it: Cat\(\)"),
    "recompute in words": ({"recompute": "yes"}, "recompute is 'yes'; give True or False"),
    "a weight as a number": ({"loss_weight": 3}, "loss_weight is 3; give a function"),
    "an unknown init": ({"init": "zeros"}, "init is 'zeros'; give 'stream' or 'per_op'"),
    "weights by number": ({"weights": 3}, "weights is 3; give a path"),
    "an unknown device": ({"device": "gpu"}, "device is 'gpu'; give the kind"),
    "no output": (
        {"model": Returns(None)},
        r"the model returns no tensor \(NoneType\); return the tensors that loss_fn",
    ),
    "outputs without a tensor": ({"model": Returns({"a": 3})}, r"the model returns no tensor \(int\)"),
    "an empty output": ({"model": Returns(()), "stages": 1}, r"the model returns no tensor \(nothing\)"),
    "a path twice": ({"split": ["1", "1"], "stages": 3}, "'1' is named twice"),
    "a bare tensor": ({"args": torch.ones(2, 4)}, r"args is a Tensor; give .* as a tuple: \(x,\)"),
    "keywords as a list": ({"kwargs": [1]}, "kwargs is a list; give .* as a dict"),
    "a name": ({"model": "gpt2"}, "model is 'gpt2'; give an nn.Module"),
    "no values": ({"model": nn.Linear(4, 4, device="meta")}, "weight is on the meta device and has no value; give the"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_named_with_what_is_expected(case: str) -> None:
    changed, words = CASES[case]
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        "args": (torch.ones(2, 4),),
        "loss_fn": lambda output, target: output.mean(),
        "stages": 2,
        "chunks": 2,
    }
    with pytest.raises(UserError, match=words):
        stagekit.pipeline(**(given | changed))


@pytest.mark.parametrize(
    "options",
    [
        {"speeds": (float("nan"), 1)},
        {"speeds": 1.0},
        {"speeds": (1, 0)},
        {"memory_bytes": "1GiB"},
        {"block_boundaries": "yes"},
        {"optimizer_state": -1},
    ],
)
def test_options_of_a_balanced_cut_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(StagekitError, match=f"{name} is .*; give"):
        stagekit.Balanced(**options)


def test_buckets_take_sizes_in_words_as_the_job_file_does() -> None:
    assert bucket_rule({"cap": "25MiB", "first": "1MiB"}) == BucketRule(25 << 20, 1 << 20)
    assert bucket_rule({"cap": 100, "first": None}) == BucketRule(100)
    assert bucket_rule({"cap": 0, "first": 1 << 20}) is None
    assert bucket_rule({"compress": "bf16"}) is None
