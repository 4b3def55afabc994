"""Who shares memory: both ends of a pair agree, what fails is a reason, and nothing is left behind."""

import gc
import json
import resource
import subprocess
import threading
import weakref

import pytest

from stagekit.errors import UserError
from stagekit.run.shm.inbox import Inbox
from tests.unit.run.shm_threads import connected, held


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = held()
    yield
    assert held() == before


def closed(made):
    """Close everything; return each rank's reasons by peer."""
    for _, helper, _ in made:
        if helper is not None:
            helper.close()
    return [reasons for _, _, reasons in made]


def changed(rank, **fields):
    """Return what makes everybody read other fields on the card of one rank."""
    return lambda of, text: json.dumps(json.loads(text) | fields) if of == rank else text


def test_all_pairs_of_a_host_share_memory():
    assert closed(connected(3)) == [{}, {}, {}]


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda: {"nonce": "00" * 32}, "process and descriptor are another's"),
        (lambda: {"host": "elsewhere"}, "not on one host"),
        (lambda: {"pid": dead_pid()}, "opening the memory of process"),
        (lambda: {"memory_fd": 10**6}, "opening the memory of process"),
        (lambda: {"bell_fd": 10**6}, "opening the memory of process"),
        (lambda: {"refusal": "no memory"}, "no memory"),
    ],
)
def test_a_pair_uses_gloo_where_one_end_cannot_reach_the_other_and_the_rest_share(fields, why):
    made = connected(3, tamper=changed(2, **fields()))
    first, second, third = closed(made)
    assert first.keys() == second.keys() == {2} and third.keys() == {0, 1}
    assert why in first[2] and why in second[2]


def test_one_rank_may_ask_for_gloo():
    first, second, third = closed(connected(3, modes=["auto", "gloo", "auto"]))
    assert first.keys() == third.keys() == {1} and second.keys() == {0, 2}
    assert "STAGEKIT_TRANSPORT=gloo" in first[1] and "STAGEKIT_TRANSPORT=gloo" in second[0]


def test_shared_memory_that_is_demanded_but_impossible_is_refused_with_the_pair_and_the_reason():
    with pytest.raises(UserError, match=r"pipeline ranks 0 and 1 can't share memory: .*not on one host"):
        connected(2, modes=["shm", "shm"], tamper=changed(1, host="elsewhere"))


def test_a_mode_that_does_not_exist_is_refused_in_words():
    with pytest.raises(
        UserError, match=r"STAGEKIT_TRANSPORT is 'ucx' on pipeline rank 1; it can be auto .* gloo or shm"
    ):
        connected(2, modes=["auto", "ucx"])


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_NOFILE"])
def test_a_process_that_may_hold_no_more_uses_gloo(limit):
    which = getattr(resource, limit)
    before = resource.getrlimit(which)
    resource.setrlimit(which, (1 << 20 if limit == "RLIMIT_FSIZE" else len(held()[0]), before[1]))
    try:
        made = connected(2)
    finally:
        resource.setrlimit(which, before)
    assert all("no memory to share" in reason for reasons in closed(made) for reason in reasons.values())
    assert [reasons.keys() for _, _, reasons in made] == [{1}, {0}]


class Forgotten:
    """A run that refers to itself: only the garbage collector ends it."""

    def __init__(self):
        self.itself = self


def test_a_run_that_the_garbage_collector_finds_in_its_own_helper_gives_everything_back(monkeypatch):
    (_, first, _), (_, second, _) = connected(2)
    (helper,) = (each for each in threading.enumerate() if each is first._thread)
    help_ = Inbox.help

    def collecting(inbox):
        if threading.current_thread() is helper:
            gc.collect()
        help_(inbox)

    gc.disable()
    try:
        weakref.finalize(Forgotten(), first.close)
        monkeypatch.setattr(Inbox, "help", collecting)
        second.close()  # rings the first one's bell
        helper.join(10.0)
    finally:
        gc.enable()
    assert not helper.is_alive()
