"""One rank fails: every rank raises that one's error at once, nothing is left of the step, and the next one runs."""

import functools
import os
import time

import pytest
import torch
from torch import nn

import stagekit
from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import RemoteError, ShapeError, StageError
from stagekit.run.shm.setup import VARIABLE
from stagekit.testing import spawn

ROWS, CHUNKS = 12, 4
STAGES_PER_RANK = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-v": 2}
PRODUCT = [
    (name, failing, over) for over in ("gloo", "shm") for name in STAGES_PER_RANK for failing in ("index", "target")
]
CASES = [  # each schedule, each failure and each transport, with what another one might hide
    ("1f1b", "index", "gloo"),
    ("zb-v", "target", "gloo"),
    ("1f1b", "target", "shm"),
    ("gpipe", "index", "shm"),
    ("zb-h1", "target", "shm"),
    ("zb-v", "index", "shm"),
]


class Looks(nn.Module):
    """An embedding in the middle, so that an index can be wrong on a later stage; BatchNorm, so that forwards write."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(6))
        self.table = nn.Embedding(10, 8)

    def forward(self, x, index):
        for number, layer in enumerate(self.layers):
            x = self.norms[number](layer(x)).tanh()
            if number == 3:
                x = x + self.table(index)
        return x


def mean_square(output, target):
    if bool(target.isnan().any()):
        raise ValueError("a target is missing")
    return ((output - target) ** 2).mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=generator), torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, 8)


@functools.cache
def captured():
    x, index, _ = batch(0)
    return capture_model(Looks, (x[:3], index[:3]), seed=1)


def run_of(schedule, stages_per_rank, replicas=1):
    pipe = plan_pipeline(
        captured(), loss_fn=mean_square, stages=2 * stages_per_rank, stages_per_rank=stages_per_rank,
        chunks=CHUNKS, schedule=schedule, split="layers" if stages_per_rank == 2 else ["layers.2"], replicas=replicas,
        seed=1,
    )  # fmt: skip
    return pipe.deploy()


def snapshot(run):
    return {name: value.clone() for name, value in run.state_dict().items()} | {
        f"gradient of {name}": p.grad.clone() for name, p in run.named_parameters() if p.grad is not None
    }


def told(error):
    kind = type(error).__name__
    return (
        kind,
        str(error),
        (error.rank, error.stage, error.chunk, error.op),
        "\n".join(getattr(error, "__notes__", ())),
    )


def fails_twice(rank, schedule, stages_per_rank, failing, replicas=1):
    """Return the errors of steps 1 and 2, and what steps 0 and 3 gave with and without them."""
    results = []
    for is_bad in (True, False):
        run, errors, losses = run_of(schedule, stages_per_rank, replicas), [], []
        for step in range(4):
            x, index, target = batch(step + 10 * run.replica)
            if is_bad and step in (1, 2) and run.replica == replicas - 1:
                if failing == "index":
                    index[7] = 99
                elif failing == "target":
                    target[7] = torch.nan
            if not is_bad and step in (1, 2):
                continue
            before = snapshot(run)
            try:
                losses.append(run.step(x, index, target=target).loss)
            except StageError as error:
                errors.append(told(error))
                after = snapshot(run)
                assert all(torch.equal(value, after[name]) for name, value in before.items())
                assert before.keys() == after.keys()
        results.append((errors, losses, snapshot(run)))
    return results


def is_given_a_short_target(rank, owner):
    """Only `owner` has the target, of four rows."""
    run = run_of("1f1b", 1)
    x, index, target = batch(0)
    before = snapshot(run)
    try:
        run.step(x, index, target=target[:4] if rank == owner else None)
    except (ShapeError, RemoteError) as error:
        state = run.state_dict()
        return type(error).__name__, str(error), all(torch.equal(before[name], state[name]) for name in state)


def all_fail_twice(rank, cases):
    found = {}
    for schedule, failing, transport in cases:
        os.environ[VARIABLE] = transport
        found[schedule, failing, transport] = fails_twice(rank, schedule, STAGES_PER_RANK[schedule], failing)
    return found


def everything(rank):
    """All that two ranks show, in one pair of processes."""
    found = all_fail_twice(rank, CASES)
    found["short"] = [is_given_a_short_target(rank, owner) for owner in (0, 1)]
    return found | {"slow": fails_while_another_computes(rank), "refused": refuses_its_batch(rank)}


@pytest.fixture(scope="module")
def two():
    return spawn(everything, 2, timeout_s=300)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_error_reaches_every_rank_and_leaves_no_trace(two, case):
    assert_reached([found[case] for found in two], case[1])


@pytest.mark.soak
def test_an_error_reaches_every_rank_under_every_schedule_over_every_transport():
    two = spawn(all_fail_twice, 2, PRODUCT, timeout_s=300)
    for case in PRODUCT:
        assert_reached([found[case] for found in two], case[1])


def assert_reached(ranks, failing):
    for (errors, losses, state), (_, clean_losses, clean_state) in ranks:
        assert len(errors) == 2
        assert losses[0] == clean_losses[0]
        assert len(losses) == 2 and state.keys() == clean_state.keys()
    by_kind = {kind: (text, place, notes) for (errors, *_), _ in ranks for kind, text, place, notes in errors}
    assert by_kind.keys() == {"StageError", "RemoteError"}
    own, remote = by_kind["StageError"], by_kind["RemoteError"]
    assert own[:2] == remote[:2]
    what = "IndexError: index out of range" if failing == "index" else "ValueError: a target is missing"
    rank, stage, chunk, op = own[1]
    assert own[0].startswith(f"rank {rank}, stage {stage}, chunk {chunk}, {op}: {what}")
    assert "(inputs: " in own[0] and "[3, 8] float32" in own[0]
    assert (chunk, op) == (2, "F")
    assert remote[2].startswith(f"on rank {rank}:\nTraceback") and what in remote[2]


def test_an_error_in_one_replica_reaches_all():
    ranks = spawn(fails_twice, 4, "1f1b", 1, "index", 2)
    (failing, other) = (ranks[number][0][0][0] for number in (3, 0))
    assert failing[0] == "StageError" and other[:3] == ("RemoteError", *failing[1:3])
    assert failing[1].startswith("rank 3 (replica 1), stage 1, chunk 2, F: IndexError") and "(inputs: " in failing[1]
    kinds = [[kind for kind, *_ in errors] for (errors, *_), _ in ranks]
    assert sorted(map(tuple, kinds)) == [("RemoteError",) * 2] * 3 + [("StageError",) * 2]


class Slow(nn.Module):
    """A first half that takes a tenth of a second a chunk, and a second that fails at once."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(10, 8)

    def forward(self, x, index):
        return self.second(Sleep.apply(self.first(x)) + self.table(index))


class Sleep(torch.autograd.Function):
    """Takes its time, and counts."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Sleep.calls += 1
        time.sleep(0.1)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def fails_while_another_computes(rank):
    """The second stage fails in its first forward; return how many of its 40 the first one ran."""
    x, index, target = torch.randn(80, 8), torch.zeros(80, dtype=torch.long), torch.zeros(80, 8)
    pipe = stagekit.pipeline(
        Slow, (x[:2], index[:2]), loss_fn=mean_square, stages=2, chunks=40, schedule="gpipe", split=["table"], seed=1
    )
    run = pipe.deploy()
    Sleep.calls = 0
    with pytest.raises(StageError):
        run.step(x, index + 99, target=target)
    return Sleep.calls


def test_nobody_computes_on_once_a_rank_has_failed(two):
    first, second = (found["slow"] for found in two)
    assert 1 <= first < 30 and second == 0


def refuses_its_batch(rank):
    run = run_of("1f1b", 1)
    x, index, target = batch(0)
    before = snapshot(run)
    kinds = []
    for step in range(3):
        rows = ROWS - 1 if step == 1 and rank == 1 else ROWS
        try:
            kinds.append(f"{run.step(x[:rows], index[:rows], target=target[:rows]).loss:.3f}")
        except (ShapeError, RemoteError) as error:
            kinds.append((type(error).__name__, str(error)))
            after = snapshot(run)
            assert all(torch.equal(before[name], after[name]) for name in before)
        before = snapshot(run)
    return kinds


def test_a_rank_that_refuses_its_batch_tells_the_others_and_the_next_step_runs(two):
    first, second = (found["refused"] for found in two)
    assert first[1][0] == "RemoteError" and second[1][0] == "ShapeError"
    assert first[1][1] == second[1][1] == "rank 1 was given 11 rows, rank 0 12; pass the same batch"
    assert first[2] == second[2]


def test_a_target_of_other_rows_is_refused_on_every_rank_before_any_stage_computes(two):
    for rank, found in enumerate(two):
        for owner, (kind, text, is_untouched) in enumerate(found["short"]):
            assert is_untouched
            assert "the target's leaf 0 has shape (4, 8), but the batch has 12 rows" in text
            assert kind == ("ShapeError" if rank == owner else "RemoteError")
