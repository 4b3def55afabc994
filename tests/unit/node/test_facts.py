from __future__ import annotations

import pytest

from piped.node import convert
from piped.node.facts import FactBook
from piped.node.model import Fact

EXITED = Fact(7, 0, "exited", 5, {"code": 0})
EMPTY = Fact(7, None, "attempt_empty", 9)


def test_a_fact_is_sent_once_per_session_until_it_is_acknowledged() -> None:
    book = FactBook()
    book.put(EXITED)
    assert book.take_unsent() == [EXITED]
    assert book.take_unsent() == []
    book.resend()
    assert book.take_unsent() == [EXITED]
    assert book.acknowledge([EXITED.key, EMPTY.key]) == [EXITED.key]
    book.resend()
    assert book.take_unsent() == []


def test_the_first_account_of_a_key_stands_also_after_its_acknowledgement() -> None:
    book = FactBook()
    assert book.put(EXITED)
    assert not book.put(Fact(7, 0, "exited", 6, {"code": 1}))
    book.acknowledge([EXITED.key])
    assert not book.put(EXITED)
    assert book.is_acknowledged(EXITED.key)
    assert not book.has_open(7)


def test_a_fact_travels_with_its_body_and_its_key_comes_back() -> None:
    message = convert.fact_message(Fact(7, 0, "exited", 5, {"signal": 9, "by_supervisor": True, "log_tail": "x"}))
    assert message.exited.signal == 9 and not message.exited.HasField("code")
    assert (message.rank, message.boottime_ns) == (0, 5)
    assert not convert.fact_message(EMPTY).HasField("rank")


def test_a_body_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="fact planned of fence 7, rank 0"):
        convert.fact_message(Fact(7, 0, "planned", 5, {"plan": {"stages": 3}}))


def test_progress_that_is_no_number_counts_as_absent() -> None:
    progress = convert.rank_progress(7, 0, {"step": 3, "loss": float("nan"), "step_s": "x", "steps": -1}, 0.0).progress
    assert progress.step == 3 and progress.loss != progress.loss
    assert (progress.step_s, progress.steps) == (0.0, 0)


def test_where_a_rank_is_travels_and_what_is_no_position_does_not() -> None:
    beat = {
        "step": 3,
        "section": "step",
        "action": "1F2",
        "waiting_on": [0, -1, "x"],
        "age_s": 2.5,
        "longest_step_s": "x",
    }
    position = convert.rank_progress(7, 0, beat, 1.5).position
    assert (position.step, position.section, position.action, position.silent_s) == (3, "step", "1F2", 1.5)
    assert (list(position.waiting_on), position.age_s, position.longest_step_s) == ([0], 2.5, 0.0)
    assert convert.rank_progress(7, 0, {"waiting_on": "all"}, 0.0).position.waiting_on_all
    assert not convert.rank_progress(7, 0, {}, 9.0).HasField("progress"), "it has said nothing yet"


def test_a_fact_says_when_it_was_on_the_coordinators_clock_within_the_error_of_the_offset() -> None:
    fact = Fact(7, 0, "joined", 5_000_000_000)
    moment = convert.fact_message(fact, (2.0, 0.25)).moment
    assert (moment.earliest_ns, moment.latest_ns) == (2_750_000_000, 3_250_000_000)
    late = convert.fact_message(fact, (2.0, 0.25), now_ns=3_605_000_000_000).moment  # an hour without coordinator
    assert (late.earliest_ns, late.latest_ns) == (2_570_000_000, 3_430_000_000)
    assert not convert.fact_message(fact).HasField("moment")
