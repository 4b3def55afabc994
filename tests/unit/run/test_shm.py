"""Transfers through shared memory: ranks are threads here, each with its own mappings, helper and descriptors."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stagekit.run.shm.ring import CAPACITY, PIECE, SLOTS
from stagekit.run.transport import settle
from tests.unit.run.shm_threads import connected, held, on_all

LARGE = CAPACITY + 3 * PIECE + 5  # bytes


@pytest.fixture
def ranks(request):
    made = connected(getattr(request, "param", 2))
    yield [transport for transport, _, _ in made]
    for _, helper, _ in made:
        helper.close()


NOISE = torch.randint(0, 256, (LARGE + 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def numbers(size, seed=0):
    return NOISE[seed : seed + size].clone()


def assert_arrives(receiver, peer, tag, expected):
    got = torch.empty_like(expected)
    receiver.recv([got], peer, tag).wait()
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_messages_are_matched_by_tag_whatever_their_order(ranks):
    messages = {tag: numbers(100 + tag, tag) for tag in (5, 6, 7)}
    for tag, message in messages.items():
        settle(ranks[0].send([message], 1, tag), 1)
    for tag in (7, 5, 6):
        assert_arrives(ranks[1], 0, tag, messages[tag])


def test_messages_of_one_tag_arrive_in_the_order_of_their_sends_posted_early_or_late(ranks):
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    works = [ranks[1].recv([got[0]], 0, 9), ranks[1].recv([got[1]], 0, 9)]
    for value in range(4):
        settle(ranks[0].send([torch.tensor([value])], 1, 9), 1)
    works[1].wait()
    works += [ranks[1].recv([tensor], 0, 9) for tensor in got[2:]]
    for work in works:
        work.wait()
    assert [int(tensor) for tensor in got] == [0, 1, 2, 3]


DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_as_it_was_sent(ranks, dtype):
    message = numbers(64).to(dtype) if dtype is torch.bool else numbers(64).view(dtype)
    settle(ranks[0].send([message], 1, 1), 1)
    assert_arrives(ranks[1], 0, 1, message)


def test_an_empty_tensor_arrives(ranks):
    for _ in range(2 * SLOTS):
        settle(ranks[0].send([torch.empty(0)], 1, 1), 1)
        assert_arrives(ranks[1], 0, 1, torch.empty(0))


def test_a_tensor_may_be_reused_once_its_send_was_waited_for(ranks):
    message = numbers(1000)
    expected = message.clone()
    settle(ranks[0].send([message], 1, 1), 1)
    message.zero_()
    assert_arrives(ranks[1], 0, 1, expected)


def test_a_message_larger_than_the_ring_arrives(ranks):
    message = numbers(LARGE)
    work = ranks[0].send([message], 1, 1)
    assert_arrives(ranks[1], 0, 1, message)
    work.wait()
    assert work.is_completed()


def test_large_messages_cross_both_ways_at_once_though_both_send_before_they_receive(ranks):
    messages = [numbers(LARGE, seed) for seed in (0, 1)]

    def exchange(rank):
        works = [ranks[rank].send([messages[rank]], 1 - rank, tag) for tag in (1, 2)]
        for tag in (2, 1):
            assert_arrives(ranks[rank], 1 - rank, tag, messages[1 - rank])
        for work in works:
            settle(work, 1 - rank)

    on_all(2, exchange)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_three_ranks_in_a_circle_send_more_than_fits_before_anyone_receives(ranks):
    message = numbers(LARGE)

    def exchange(rank):
        work = ranks[rank].send([message], (rank + 1) % 3, 1)
        got = torch.empty_like(message)
        received = ranks[rank].recv([got], (rank - 1) % 3, 1)
        work.wait()  # nobody waits for its receive before its own send is over
        received.wait()
        assert torch.equal(got, message)

    on_all(3, exchange)


def test_a_send_ends_once_it_is_posted_for_even_if_the_receiver_never_looks(ranks):
    message = numbers(LARGE).repeat(2)
    got = torch.empty_like(message)
    work = ranks[0].send([message], 1, 1)
    received = ranks[1].recv([got], 0, 1)
    work.wait()
    received.wait()
    assert torch.equal(got, message)


def test_a_send_that_nobody_posted_for_takes_no_more_than_its_ring(ranks):
    message = numbers(LARGE)
    work = ranks[0].send([message], 1, 1)
    queued = ranks[0].send([numbers(10)], 1, 2)
    assert not work.is_completed() and not queued.is_completed()
    assert_arrives(ranks[1], 0, 2, numbers(10))  # what stands before it makes room
    assert_arrives(ranks[1], 0, 1, message)
    work.wait()
    queued.wait()


def test_more_small_messages_than_slots_arrive_in_order(ranks):
    works = [ranks[0].send([torch.tensor([number])], 1, number) for number in range(3 * SLOTS)]
    for number in range(3 * SLOTS):
        assert_arrives(ranks[1], 0, number, torch.tensor([number]))
    for work in works:
        settle(work, 1)


def test_random_messages_arrive_whole_in_any_order_of_posting_and_waiting(ranks):
    chance = random.Random(7)
    sizes = [0, 1, 63, 64, 65, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, CAPACITY // 2]
    plans = [[(chance.randrange(40), chance.choice(sizes)) for _ in range(80)] for _ in range(2)]

    def exchange(rank):
        own, theirs, chance = plans[rank], plans[1 - rank], random.Random(rank)
        sends = [ranks[rank].send([numbers(size, number)], 1 - rank, tag) for number, (tag, size) in enumerate(own)]
        by_tag = {}
        for number, (tag, size) in enumerate(theirs):
            by_tag.setdefault(tag, []).append((number, size))
        order = [tag for tag, _ in theirs]
        chance.shuffle(order)
        posted = []
        while order or posted:
            if order and chance.random() < 0.6:
                tag = order.pop()
                number, size = by_tag[tag].pop(0)
                got = torch.empty(size, dtype=torch.uint8)
                posted.append((ranks[rank].recv([got], 1 - rank, tag), got, number))
            elif posted:
                work, got, number = posted.pop(chance.randrange(len(posted)))
                work.wait()
                assert work.is_completed()
                assert torch.equal(got, numbers(len(got), number))
        for work in sends:
            settle(work, 1 - rank)

    on_all(2, exchange)


@pytest.mark.parametrize("is_posted_first", [True, False])
@pytest.mark.parametrize("size", [8, 2 * PIECE])
def test_a_message_of_another_size_is_refused_with_both_sizes(ranks, is_posted_first, size):
    got = torch.empty(5, dtype=torch.uint8)
    if is_posted_first:
        received = ranks[1].recv([got], 0, 1)
    settle(ranks[0].send([numbers(size)], 1, 1), 1)
    settle(ranks[0].send([numbers(3)], 1, 2), 1)
    assert_arrives(ranks[1], 0, 2, numbers(3))
    if not is_posted_first:
        received = ranks[1].recv([got], 0, 1)
    with pytest.raises(RuntimeError, match=f"a message of {size} bytes came where 5 were expected"):
        received.wait()


def test_nothing_within_the_timeout_is_an_error():
    (first, helper, _), (_, other, _) = connected(2, timeout_s=0.05)
    with pytest.raises(RuntimeError, match="nothing came within"):
        first.recv([torch.empty(1)], 1, 1).wait()
    with pytest.raises(RuntimeError, match="nobody made room"):
        first.send([torch.empty(CAPACITY)], 1, 1).wait()
    helper.close()
    other.close()


def test_last_words_arrive_after_the_sender_ended_and_then_waiting_is_an_error():
    (_, left, _), (second, helper, _) = made = connected(2)
    settle(made[0][0].send([numbers(10)], 1, 1), 1)
    left.close()
    assert_arrives(second, 0, 1, numbers(10))
    with pytest.raises(RuntimeError, match="the other side ended its run"):
        second.recv([torch.empty(1)], 0, 1).wait()
    with pytest.raises(RuntimeError, match="the other side ended its run"):
        second.send([torch.empty(CAPACITY)], 0, 1).wait()
    helper.close()


def test_a_rank_that_waits_hears_that_the_other_one_ended():
    (_, left, _), (second, helper, _) = connected(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(second.recv([torch.empty(1)], 0, 1).wait)
        left.close()
        with pytest.raises(RuntimeError, match="the other side ended its run"):
            waiting.result(20)
    helper.close()


def test_a_closed_run_says_so():
    made = connected(2)
    for transport, helper, _ in made:
        helper.close()
        for transfer in (transport.send, transport.recv):
            with pytest.raises(RuntimeError, match="this run was closed"):
                transfer([torch.empty(1)], 0, 1)


def test_closing_gives_back_every_descriptor_and_thread():
    before = held()
    made = connected(3)
    for rank, (transport, _, _) in enumerate(made):
        settle(transport.send([numbers(10)], (rank + 1) % 3, 1), (rank + 1) % 3)
    for _, helper, _ in made:
        helper.close()
        helper.close()
    assert held() == before
