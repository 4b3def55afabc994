"""Where a rank says that it is: what its loop wrote last, and since when."""

import socket
import threading

import pytest
import torch
from torch import nn

from piped.lines import LineReader
from piped.worker.link import Link
from piped.worker.position import ALL, CLIP, DATA, Position
from stagekit.plan.plan import make_plan
from stagekit.run.lane import RunOptions
from stagekit.run.runtime import Run
from stagekit.testing import ChainSource

WIDTH = 4


@pytest.fixture
def run():
    source = ChainSource([nn.Linear(WIDTH, WIDTH)], WIDTH, 2)
    plan = make_plan(source.spec, schedule="gpipe", num_chunks=1)
    return Run(source, plan, RunOptions(nn.functional.mse_loss, None, 0), torch.device("cpu"), None)


@pytest.fixture
def position(run):
    here, there = socket.socketpair()
    made = Position(Link(here.detach()), run)
    made.close()
    there.recv(65536)  # its thread has looked once, and leaves
    yield made
    there.close()


def step(run):
    run.step(torch.ones(2, WIDTH), target=torch.zeros(2, WIDTH))


def test_it_is_in_the_first_step_until_that_has_ended(run, position):
    position.begin_batch()
    assert position.look()["section"] == "first step"
    step(run)
    position.end_step()
    position.begin_batch()
    assert (position.look()["section"], position.look()["step"]) == ("step", 1)


def test_its_age_grows_while_the_loop_stands_and_is_none_after_a_move(run, position):
    position.enter(DATA)
    position.look()
    assert position.look()["age_s"] > 0.0
    position.begin_batch()
    assert position.look()["age_s"] == 0.0
    position.look()
    step(run)
    assert position.look()["age_s"] == 0.0, "actions are moves, too"


def test_it_says_whom_it_waits_for_inside_a_section_and_where_it_was_after_it(position):
    position.enter(DATA)
    with position.inside(CLIP, ALL):
        assert (position.look()["section"], position.look()["waiting_on"]) == ("clip", "all")
    assert (position.look()["section"], position.look()["waiting_on"]) == ("data", [])


def test_the_longest_step_is_the_first_until_there_is_another_one(position):
    assert position.look()["longest_step_s"] == 0.0
    position.begin_step()
    threading.Event().wait(0.05)
    position.end_step()
    first_s = position.look()["longest_step_s"]
    assert first_s >= 0.05
    position.begin_step()
    position.end_step()
    assert 0.0 < position.look()["longest_step_s"] < first_s


def test_a_thread_tells_it_unasked_while_the_loop_is_busy(run):
    here, there = socket.socketpair()
    there.settimeout(20.0)
    position, reader = Position(Link(here.detach()), run), LineReader()
    (beat, *_) = reader.feed(there.recv(65536))
    assert (beat["type"], beat["section"]) == ("beat", "first step")
    position.close()
