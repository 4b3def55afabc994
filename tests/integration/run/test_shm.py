"""Shared memory between real processes: the same bits as over gloo, mixed with it, and what a lost neighbour does."""

import functools
import gc
import os
import random
import signal
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stagekit
from stagekit.errors import PeerError, StagekitError, UserError
from stagekit.run.groups import Groups
from stagekit.run.shm.ring import CAPACITY, PIECE
from stagekit.run.shm.setup import VARIABLE
from stagekit.run.transport import settle
from stagekit.testing import spawn
from tests.integration.run.scenarios import CHUNKS, batch, chain_run, gradients, modules, plain_loop

CPU = torch.device("cpu")


@functools.cache
def noise():
    return torch.randint(0, 256, (CAPACITY + 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def numbers(size, seed):
    return noise()[seed : seed + size]


# ---- what the processes do


def random_messages(rank):
    """Both ways at once, over all sizes, posted and waited for in any order; return how many came whole."""
    groups, chance = Groups(2, 1, None, CPU), random.Random(3)
    transport, peer = groups.transport(), 1 - rank
    sizes = [0, 8, 1000, PIECE, PIECE + 1, 4 * PIECE, CAPACITY + 9]
    plans = [[chance.choice(sizes) for _ in range(60)] for _ in range(2)]
    sends = [transport.send([numbers(size, tag)], peer, tag) for tag, size in enumerate(plans[rank])]
    tags, whole, posted = list(range(60)), 0, []
    chance.seed(rank)
    chance.shuffle(tags)
    while tags or posted:
        if tags and chance.random() < 0.6:
            tag = tags.pop()
            got = torch.empty(plans[peer][tag], dtype=torch.uint8)
            posted.append((transport.recv([got], peer, tag), got, tag))
        elif posted:
            work, got, tag = posted.pop(chance.randrange(len(posted)))
            settle(work, peer)
            whole += torch.equal(got, numbers(len(got), tag))
    for work in sends:
        settle(work, peer)
    dist.barrier()
    groups.close()
    return whole


def held():
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def what_runs_leave(rank):
    """Make and end runs; return the descriptors and threads that are left after each."""
    counts = []
    for by in ("closing", "forgetting", "closing", "forgetting"):
        run = chain_run(2, "1f1b", None)
        run.step(*batch()[:1], target=batch()[1])
        assert any(thread.name == "stagekit shared memory" for thread in threading.enumerate())
        if by == "closing":
            run.close()
        del run
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "stagekit alarm":
                thread.join(10.0)  # it ends by itself, a moment later
        counts.append(held())
    return counts


MODES = {
    ("auto", "auto", "auto"): [{1: "shm", 2: "shm"}, {0: "shm", 2: "shm"}, {0: "shm", 1: "shm"}],
    ("shm", "shm", "shm"): [{1: "shm", 2: "shm"}, {0: "shm", 2: "shm"}, {0: "shm", 1: "shm"}],
    ("auto", "auto", "gloo"): [{1: "shm", 2: "gloo"}, {0: "shm", 2: "gloo"}, {0: "gloo", 1: "gloo"}],
    ("gloo", "auto", "auto"): [{1: "gloo", 2: "gloo"}, {0: "gloo", 2: "shm"}, {0: "gloo", 1: "shm"}],
    ("shm", "auto", "gloo"): None,
}


def three_ranks(rank):
    return {modes: asks(rank, modes[rank]) for modes in MODES}


def asks(rank, mode):
    """Train three stages where each rank asks for its own transport."""
    os.environ[VARIABLE] = mode
    try:
        run = chain_run(3, "1f1b", None)
    except UserError as error:
        return str(error)
    for _ in range(2):
        run.zero_grad()
        loss = (run.step(batch()[0], target=batch()[1]) if rank == 0 else run.step()).loss
    return {"loss": loss, "grads": gradients(run), "transports": run.transports}


def stops_for_a_while(rank):
    """Rank 1 stops; return what rank 0 is told after the group's timeout, and whether both go on afterwards."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    groups = Groups(2, 1, group, CPU)
    transport, pids = groups.transport(), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    told = ""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        try:
            settle(transport.recv([torch.empty(1)], 1, 1), 1)
        except PeerError as error:
            told = str(error)
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    groups.close()
    return told


def dies(rank, report):
    """Rank 1 dies while rank 0 waits for it; rank 0 writes down what it is told, and when."""
    transport = Groups(2, 1, None, CPU).transport()
    if rank == 1:
        settle(transport.recv([torch.empty(1)], 0, 1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    settle(transport.send([torch.empty(1)], 1, 1), 1)
    large, begun = transport.send([torch.empty(CAPACITY)], 1, 2), monotonic()
    for wait in (transport.recv([torch.empty(1)], 1, 1), large):
        try:
            settle(wait, 1)
        except PeerError as error:
            with report.open("a") as file:
                file.write(f"{error.peer_rank} {monotonic() - begun:.3f} {error}\n")


class Spectrum(nn.Module):
    """What crosses the cut is a conjugate, which torch only marks as one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), OfImaginary(8, 8)

    def forward(self, x):
        return self.second(torch.fft.fft(self.first(x)).conj())


class OfImaginary(nn.Linear):
    def forward(self, z):
        return super().forward(z.imag)


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def conjugates(rank, mode):
    os.environ[VARIABLE] = mode
    x, target = batch()
    run = stagekit.pipeline(
        Spectrum, (x[:4],), loss_fn=mean_square, stages=2, chunks=3, split=["second"], seed=3
    ).deploy()  # fmt: skip
    loss = run.step(x, target=target).loss
    torch.manual_seed(3)
    return loss, mean_square(Spectrum()(x), target).item()


def two_ranks(rank):
    """All that two ranks show, in one pair of processes."""
    return {
        "whole": random_messages(rank),
        "left": what_runs_leave(rank),
        "stopped": stops_for_a_while(rank),
        "conjugates": [conjugates(rank, mode) for mode in ("gloo", "shm")],
    }


@pytest.fixture(scope="module")
def two():
    return spawn(two_ranks, 2)


# ---- what that shows


def test_random_messages_cross_whole(two):
    assert [found["whole"] for found in two] == [60, 60]


def test_a_run_that_is_closed_or_forgotten_gives_back_its_thread_and_its_descriptors(two):
    for found in two:
        assert len(set(found["left"])) == 1


def test_a_neighbour_that_stopped_is_an_error_after_the_groups_timeout(two):
    assert "nothing came within 1 s" in two[0]["stopped"]


def test_whoever_waits_for_a_neighbour_hears_at_once_that_it_was_killed(tmp_path):
    with pytest.raises(StagekitError, match="failed"):
        spawn(dies, 2, tmp_path / "report")
    heard = (tmp_path / "report").read_text().splitlines()
    assert len(heard) == 2  # a receive, and a send that found no room
    for line in heard:
        peer, seconds, text = line.split(" ", 2)
        assert peer == "1" and float(seconds) < 1.0
        assert text == "transfer with pipeline rank 1: shared memory: the process of pipeline rank 1 is gone"


def test_a_conjugate_arrives_as_one(two):
    for found in two:
        for loss, plain in found["conjugates"]:
            assert loss == pytest.approx(plain, rel=1e-6)


@pytest.fixture(scope="module")
def three():
    return spawn(three_ranks, 3)


@pytest.mark.parametrize("modes", [modes for modes, expected in MODES.items() if expected], ids="-".join)
def test_pairs_that_share_memory_and_pairs_that_do_not_train_one_model_bit_for_bit(three, modes):
    results = [found[modes] for found in three]
    assert [result["transports"] for result in results] == MODES[modes]
    model = nn.Sequential(*modules(3))
    loss, _ = plain_loop(model, *batch(), CHUNKS)
    assert {result["loss"] for result in results} == {loss}
    grads = {name: gradient for result in results for name, gradient in result["grads"].items()}
    assert all(torch.equal(grads[name], parameter.grad) for name, parameter in model.named_parameters())


def test_every_rank_refuses_alike_what_one_rank_demands_in_vain(three):
    first, *others = [found["shm", "auto", "gloo"] for found in three]
    assert "pipeline ranks 0 and 2 can't share memory: on the other side: STAGEKIT_TRANSPORT=gloo" in first
    assert others == [first, first]
