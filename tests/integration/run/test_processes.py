"""Real processes over gloo: what four ranks do together equals the unsplit model. The ranks' side is scenarios.py."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from stagekit.errors import StagekitError
from stagekit.testing import spawn
from tests.integration.run import scenarios
from tests.integration.run.scenarios import CHUNKS, Masked, batch, mask, modules, plain_loop, small_model


@pytest.fixture(scope="module")
def ranks():
    return spawn(scenarios.everything, 4)


def merged(results):
    return {name: gradient for result in results for name, gradient in result["grads"].items()}


def assert_equal(results, model):
    loss, _ = plain_loop(model, *batch(), CHUNKS)
    grads = merged(results)
    assert {result["loss"] for result in results} == {loss}
    for name, parameter in model.named_parameters():
        assert torch.equal(grads[name], parameter.grad), name


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_equals_the_unsplit_chain_bit_for_bit_when_only_rank_0_passes_anything(ranks, stages, schedule):
    results = [rank[f"{stages} {schedule}"] for rank in ranks[:stages]]
    assert_equal(results, nn.Sequential(*modules(stages)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_chunks_held_are_those_the_plan_predicts(ranks, stages, schedule):
    for rank in ranks[:stages]:
        held, planned = rank[f"{stages} {schedule}"]["peak"]
        assert held == planned


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_receive_buffers_are_those_the_list_holds_at_once(ranks, stages, schedule):
    for rank in ranks[:stages]:
        result = rank[f"{stages} {schedule}"]
        assert result["buffers"] == most_buffers(result["lists"])


def most_buffers(row):
    """Return the most receive buffers in use at once: a backward gives back all that its chunk received."""
    held, most = {}, 0
    for action in row:
        chunk = action.lstrip("0123456789").lstrip("RECVSND_FBX")
        if "RECV_F" in action or "RECV_B" in action:
            held[chunk] = held.get(chunk, 0) + 1
            most = max(most, sum(held.values()))
        elif "_" not in action and "B" in action:
            held.pop(chunk, None)
    return most


def test_replicas_are_bit_equal_and_equal_the_full_batch(ranks):
    results = [rank["replicas"] for rank in ranks]
    model = nn.Sequential(*modules(2))
    loss, expected = plain_loop(model, *batch(24), 2 * CHUNKS)
    for result in results:
        assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert all(torch.equal(g, results[2]["grads"][name]) for name, g in results[0]["grads"].items())
    assert all(torch.equal(g, results[3]["grads"][name]) for name, g in results[1]["grads"].items())
    for name, gradient in merged(results[:2]).items():
        torch.testing.assert_close(gradient, expected[name])


def test_a_world_that_does_not_fit_is_refused_with_all_four_numbers(ranks):
    for rank in ranks:
        for part in ("world size 4", "stages 3", "stages_per_rank 1", "replicas 1"):
            assert part in rank["wrong world"]


def test_a_pipeline_runs_in_a_group_of_some_ranks(ranks):
    assert [rank["subgroup"] is not None for rank in ranks] == [False, True, False, True]
    assert_equal([ranks[1]["subgroup"], ranks[3]["subgroup"]], nn.Sequential(*modules(2)))


def test_a_stage_stepped_by_hand_equals_the_unsplit_model(ranks):
    loss, expected = plain_loop(small_model(), *batch(), CHUNKS)
    results = [rank["by hand"] for rank in ranks[:2]]
    assert {result["loss"] for result in results} == {loss}
    grads = merged(results)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_clipping_uses_the_norm_of_the_whole_model(ranks):
    model = small_model()
    plain_loop(model, *batch(), CHUNKS)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    clipped = {name: g for rank in ranks[:2] for name, g in rank["by hand"]["clipped"].items()}
    for rank in ranks[:2]:
        assert rank["by hand"]["norm"] == pytest.approx(norm, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-6, atol=1e-8)


def test_each_rank_may_pass_only_what_it_owns(ranks):
    loss, expected = plain_loop(Masked(), *batch(), CHUNKS, mask())
    results = [rank["own arguments"] for rank in ranks[:2]]
    assert {result["loss"] for result in results} == {loss}
    assert all(torch.equal(g, expected[name]) for name, g in merged(results).items())


def test_an_argument_left_out_of_a_later_step_is_refused_everywhere_and_the_next_step_runs(ranks):
    (first, refused, third), (other_first, victim, other_third) = (rank["forgets"] for rank in ranks[:2])
    assert "rank 0 passed args[0] to the first step(), but not to the one at step 1" in refused
    assert victim == refused  # in the words of the rank that refused
    assert first == third == other_first == other_third


def test_spawn_raises_what_a_stage_raised_with_its_rank_and_traceback():
    with pytest.raises(StagekitError) as caught:
        spawn(scenarios.fails_in_stage_1, 2)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:")
    assert "stage 1, chunk 0, F: RuntimeError: boom" in text
    assert 'raise RuntimeError("boom")' in text


def test_a_script_under_torchrun_trains(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


SCRIPT = """
    import torch, stagekit
    from torch import nn

    context = stagekit.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, target = torch.randn(8, 4), torch.randn(8, 1)
    pipe = stagekit.pipeline(model, (x[:2],), loss_fn=nn.functional.mse_loss, stages=2, chunks=4)
    run = pipe.deploy()
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    for _ in range(4):
        loss = run.step(x, target=target).loss
        optimizer.step()
        optimizer.zero_grad()
        if context.rank == 0:
            print(loss, flush=True)
    torch.distributed.destroy_process_group()
"""
