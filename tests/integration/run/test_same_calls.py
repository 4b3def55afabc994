"""Every rank makes the same calls; where one does not, all raise at once, and the next call that they all make runs."""

import contextlib
import functools

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import RemoteError, StagekitError, UserError
from stagekit.testing import spawn

ROWS, CHUNKS, WIDTH = 8, 2, 4


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 2, generator=generator)


@functools.cache
def pipe(replicas=1, stages=2):
    return stagekit.pipeline(
        model, (batch()[0][:4],), loss_fn=nn.functional.mse_loss, stages=stages, chunks=CHUNKS,
        split=["2"][: stages - 1], replicas=replicas, seed=2,
    )  # fmt: skip


def call(run, name):
    x, target = batch()
    if name == "late step":
        run.step_number += 1
    try:
        if name == "clip":
            return run.clip_grad_norm_(1.0)
        if name == "scaler":
            return stagekit.GradScaler(run, init_scale=1.0).unscale_(None)
        with run.no_sync() if name == "unsynced step" else contextlib.nullcontext():
            return (run.eval if name == "eval" else run.step)(x, target=target).loss
    except (UserError, RemoteError) as error:
        return type(error).__name__, str(error)
    finally:
        run.step_number -= name == "late step"


# whether nothing was called before, what rank 0 calls, what rank 1 calls
CASES = {
    "first step, first eval": (True, "step", "eval"),
    "first eval, first step": (True, "eval", "step"),
    "step, eval": (False, "step", "eval"),
    "eval, step": (False, "eval", "step"),
    "step, unsynced step": (False, "step", "unsynced step"),
    "step, late step": (False, "step", "late step"),
    "late eval, step": (False, "late step", "step"),
    "first step, clip": (True, "step", "clip"),
    "clip, first step": (True, "clip", "step"),
    "clip, step": (False, "clip", "step"),
    "step, clip": (False, "step", "clip"),
    "clip, eval": (False, "clip", "eval"),
    "scaler, clip": (False, "scaler", "clip"),
    "step, scaler": (False, "step", "scaler"),
}


def differ(rank):
    found, calm = {}, pipe().deploy()
    call(calm, "step"), call(calm, "eval")
    for name, (is_fresh, *calls) in CASES.items():
        run = pipe().deploy() if is_fresh else calm
        run.zero_grad()
        state = {key: value.clone() for key, value in run.state_dict().items()}
        told = call(run, calls[rank])
        assert all(torch.equal(value, state[key]) for key, value in run.state_dict().items())
        assert all(p.grad is None for p in run.parameters())
        found[name] = told, call(run, "step"), call(run, "eval")
    return found | {"replicas": replicas_differ(rank, stages=1)}


@pytest.fixture(scope="module")
def two():
    return spawn(differ, 2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_call_different_things_all_raise_and_go_on(two, name):
    first, second = (found[name] for found in two)
    (kind, text), (own_kind, own_text) = first[0], second[0]
    assert kind == "RemoteError" and own_kind == "UserError"
    assert own_text in text
    if "late" in name:
        assert "rank 1 is at step " in own_text and "the pipeline's first rank at step " in own_text
    else:
        assert "rank 1 called " in own_text and "where the pipeline's first rank called " in own_text
    assert first[1:] == second[1:] and all(isinstance(loss, float) for loss in first[1:])


def replicas_differ(rank, stages):
    run = pipe(replicas=2, stages=stages).deploy()
    found = [call(run, "step"), call(run, "eval")]
    for calls in (("step", "eval"), ("eval", "step"), ("step", "unsynced step"), ("clip", "step"), ("step", "clip")):
        found.append(call(run, calls[run.replica]))
        run.zero_grad()
        found.append(call(run, "step"))
    return found


def assert_all_raised(ranks):
    for position in (2, 4, 6, 8, 10):
        told = [found[position] for found in ranks]
        assert {kind for kind, _ in told} <= {"RemoteError", "UserError"}
        assert any(text.startswith(f"rank {len(ranks) // 2} called") for _, text in told)
        assert len({found[position + 1] for found in ranks}) == 1 and isinstance(ranks[0][position + 1], float)


def test_replicas_that_call_different_things_all_raise_and_go_on(two):
    assert_all_raised([found["replicas"] for found in two])


@pytest.mark.soak
def test_replicas_of_several_ranks_that_call_different_things_all_raise_and_go_on():
    assert_all_raised(spawn(replicas_differ, 4, 2))


# ---- deploy


def deployed_in_part(rank):
    """Return what deploying raises on every rank where `parallelize` raises on one of them."""

    def parallelize(module, mesh):
        if rank == 1:
            raise ValueError("no room")
        return module

    own = stagekit.pipeline(
        model, (batch()[0][:4],), loss_fn=nn.functional.mse_loss, stages=2, chunks=CHUNKS, split=["2"],
        parallelize=parallelize, seed=2,
    )  # fmt: skip
    try:
        own.deploy()
    except (ValueError, RemoteError) as error:
        return type(error).__name__, str(error), call(pipe().deploy(), "step")


def test_a_stage_that_can_not_be_made_on_one_rank_is_told_on_all_and_the_next_pipeline_runs():
    first, second = spawn(deployed_in_part, 2)
    assert first[:2] == ("RemoteError", "rank 1: ValueError: no room") and second[:2] == ("ValueError", "no room")
    assert first[2] == second[2] and isinstance(first[2], float)


# ---- one rank


def test_an_evaluation_under_inference_mode_scores_as_outside_of_it():
    run, (x, target) = pipe(stages=1).deploy(), batch()
    with torch.inference_mode():
        inside = [run.eval(x.clone(), target=target).loss for _ in range(2)]
    outside = run.eval(x, target=target)
    assert inside == [outside.loss] * 2
    run.step(x, target=target)
    assert all(p.grad is not None for p in run.parameters())


def test_a_closed_run_evaluates_nothing():
    run, (x, target) = pipe(stages=1).deploy(), batch()
    run.eval(x, target=target)
    run.close()
    with pytest.raises(UserError, match="this run was closed; deploy the pipeline again"):
        run.eval(x, target=target)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_target_that_only_some_evaluations_are_given_is_refused_in_the_words_of_the_call(is_first):
    run, (x, target) = pipe(stages=1).deploy(), batch()
    run.step(x, target=target)
    run.eval(x, target=target if is_first else None)
    with pytest.raises(StagekitError, match=r"target to (the first )?eval\(\).* every eval\(\)"):
        run.eval(x, target=None if is_first else target)


def test_gradients_of_earlier_steps_outlive_a_step_that_is_refused():
    def partly_frozen():
        made = model()
        made[0].bias.requires_grad_(False)
        return made

    x, target = batch()
    run = stagekit.pipeline(
        partly_frozen, (x[:4],), loss_fn=nn.functional.mse_loss, stages=1, chunks=CHUNKS, seed=2
    ).deploy()
    run.step(x, target=target)
    before = {name: p.grad.clone() for name, p in run.named_parameters() if p.grad is not None}
    frozen = dict(run.named_parameters())["0.bias"]
    for bad_x, bad_target, thawed in ((x[:, :3], target, False), (x, target[:5], False), (x, target, True)):
        frozen.requires_grad_(thawed)
        with pytest.raises(StagekitError):
            run.step(bad_x, target=bad_target)
        assert all(torch.equal(p.grad, before[name]) for name, p in run.named_parameters() if p is not frozen)
