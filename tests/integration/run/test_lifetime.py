"""What a run holds beside its stages ends with it: threads, connections, memory."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import UserError
from stagekit.testing import spawn
from tests.integration.run.scenarios import CHUNKS, WIDTH, batch, mean_square, small_model


def alarms():
    return [thread for thread in threading.enumerate() if thread.name == "stagekit alarm"]


def ended(threads):
    for thread in threads:
        thread.join(10.0)
    return not any(thread.is_alive() for thread in threads)


def deployed():
    pipe = stagekit.pipeline(small_model(), (torch.randn(3, WIDTH),), loss_fn=mean_square, stages=2, chunks=CHUNKS)
    return pipe.deploy()


def close_and_forget(rank):
    x, target = batch()
    run = deployed()
    run.step(x, target=target)
    first = alarms()
    run.close()
    found = {"closed": (len(first), ended(first))}
    with pytest.raises(UserError, match="this run was closed"):
        run.step(x, target=target)
    run = deployed()
    run.step(x, target=target)
    second = alarms()
    del run
    gc.collect()
    found["forgotten"] = (len(second), ended(second))
    return found


def test_the_thread_that_hears_of_errors_ends_when_its_run_is_closed_or_forgotten():
    for rank in spawn(close_and_forget, 2):
        assert rank == {"closed": (1, True), "forgotten": (1, True)}


class Tied(nn.Module):
    """Both stages hold one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def deploy_again(rank):
    """Tied stages, and replicas: each deployed three times, the optimizer kept."""
    x, target = batch()
    found, kept = {}, []
    for name, stages, replicas in (("ties", 2, 1), ("replicas", 1, 2)):
        pipe = stagekit.pipeline(
            Tied, (torch.randn(3, WIDTH),), loss_fn=mean_square, stages=stages, chunks=CHUNKS, replicas=replicas,
            split=["last"][: stages - 1],
        )  # fmt: skip
        found[name] = []
        for is_closed in (True, True, False, True):
            run = pipe.deploy()
            loss = run.step(x, target=target).loss
            kept.append(torch.optim.SGD(run.parameters()))
            if is_closed:
                run.close()
            del run
            gc.collect()
            torch.distributed.barrier()
            found[name].append((held()[1], loss))
    return found


def test_a_run_that_is_closed_or_forgotten_leaves_no_connections_of_its_groups():
    for rank in spawn(deploy_again, 2):
        for seen in rank.values():
            assert len(set(seen)) == 1, rank


# ---- many steps


def held():
    """Resident memory in KiB, descriptors and threads of this process."""
    own = Path("/proc/self")
    pages = int((own / "statm").read_text().split()[1])
    descriptors = sum(1 for _ in (own / "fd").iterdir())
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024, descriptors, threading.active_count()


def many_steps(rank, steps, schedule, stages_per_rank):
    x, target = batch()
    pipe = stagekit.pipeline(
        small_model(), (torch.randn(3, WIDTH),), loss_fn=mean_square, stages=2 * stages_per_rank, chunks=CHUNKS,
        schedule=schedule, stages_per_rank=stages_per_rank, split="balanced:flops",
    )  # fmt: skip
    run, seen = pipe.deploy(), []
    optimizer = torch.optim.SGD(run.parameters(), 1e-3)
    every = max(1, steps // 10)
    for number in range(1, steps + 1):
        run.step(x, target=target) if rank == 0 else run.step()
        optimizer.step()
        optimizer.zero_grad()
        if number % every == 0:
            gc.collect()
            seen.append(held())
    return seen


def assert_nothing_grows(ranks, most_kib):
    for seen in ranks:
        warm = seen[len(seen) // 2 :]
        assert len({threads for _, _, threads in warm}) == 1, seen
        assert len({descriptors for _, descriptors, _ in warm}) == 1, seen
        assert max(kib for kib, _, _ in warm) - warm[0][0] <= most_kib, seen


def test_300_steps_hold_no_more_than_the_first_ones():
    assert_nothing_grows(spawn(many_steps, 2, 300, "1f1b", 1), most_kib=512)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zb-v", 2)])
def test_20000_tiny_steps_hold_no_more_than_the_first_ones(schedule, stages_per_rank):
    started = time.monotonic()
    assert_nothing_grows(spawn(many_steps, 2, 20_000, schedule, stages_per_rank, timeout_s=1500.0), most_kib=1024)
    assert time.monotonic() - started < 1500.0
