from __future__ import annotations

import pytest

from piped.core.liveness import Cadence, Leases
from piped.core.specs import check
from piped.errors import SpecError
from tests.unit.core.build import spec


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        ({"name": "Bad Name"}, "name", "is no job name"),
        ({"program": "gpt.py"}, "program", "module:Class"),
        ({"stages": 0}, "pipeline.stages", "at least 1"),
        ({"chunks": -1}, "pipeline.chunks", "at least 1"),
        ({"schedule": "dance"}, "pipeline.schedule", "gpipe, 1f1b"),
        ({"schedule": "zb-v"}, "pipeline.stages_per_rank", "write stages_per_rank: 2"),
        ({"schedule": "dualpipe-v", "stages": 8, "stages_per_rank": 2, "chunks": 7}, "pipeline.chunks", "chunks: 8"),
        ({"steps": 0}, "train.steps", "at least 1"),
        ({"log_every": 0}, "train.log_every", "at least 1"),
        ({"device": "tpu"}, "resources.device", "auto, cpu, cuda"),
        ({"stages": 100_000}, "pipeline.stages", "the limit is 4096"),
        ({"source_sha256": "../x"}, "source", "SHA-256"),
        ({"env": (("1A", ""),)}, "env.1A", "no name"),
        ({"env": (("LD_PRELOAD", "x"),)}, "env.LD_PRELOAD", "choose another"),
        ({"env": (("A", "x" * 131_066),)}, "env.A", "the limit is 131068"),
        ({"env": (("A", "x\0"),)}, "env.A", "NUL"),
    ],
)
def test_every_mistake_is_told_with_its_field(changes, field, word):
    with pytest.raises(SpecError) as refused:
        check(spec(**changes))
    assert [each.field for each in refused.value.violations] == [field]
    assert word in refused.value.violations[0].description


def test_stages_that_do_not_divide_are_refused_with_all_four_numbers():
    with pytest.raises(SpecError, match=r"5 stages / 2 stages per rank × 3 replicas .* \(7.50\)"):
        check(spec(stages=5, stages_per_rank=2, replicas=3))


def test_a_good_spec_passes():
    check(spec(stages=4, stages_per_rank=2, schedule="interleaved", env=(("OMP_NUM_THREADS", "1"),)))


def test_a_lease_ends_a_ttl_after_the_last_beat():
    leases = Leases(Cadence(1.0, 4.0), last_tick_s=0.0, not_before_s=0.0)
    leases.beat("n1", 1.0)
    assert leases.tick(["n1"], 2.0) == []
    assert leases.tick(["n1"], 4.0) == []
    assert leases.tick(["n1"], 5.0) == ["n1"]


def test_no_lease_ends_during_the_grace_after_a_start():
    leases = Leases(Cadence(1.0, 4.0), last_tick_s=0.0, not_before_s=34.0)
    assert [leases.tick(["n1"], float(now_s)) for now_s in range(34)] == [[]] * 34
    assert leases.tick(["n1"], 34.0) == ["n1"]


def test_no_lease_ends_because_the_coordinator_was_late():
    leases = Leases(Cadence(1.0, 4.0), last_tick_s=0.0, not_before_s=0.0)
    leases.beat("n1", 0.0)
    assert leases.tick(["n1"], 60.0) == []
    assert leases.tick(["n1"], 62.0) == []
    assert leases.tick(["n1"], 64.0) == ["n1"]


def test_a_large_fleet_beats_less_often_and_each_node_is_told_once_without_losing_it_meanwhile():
    small = Cadence(1.0, 4.0)
    assert [small.for_fleet(count) for count in (0, 1000, 1001, 5000)] == [
        small, small, Cadence(2.0, 8.0), Cadence(5.0, 20.0)
    ]  # fmt: skip
    leases = Leases(small, last_tick_s=0.0, not_before_s=0.0)
    leases.beat("n1", 0.0)
    leases.cadence = small.for_fleet(5000)
    assert leases.beat("n1", 1.0) == Cadence(5.0, 20.0)
    assert leases.beat("n1", 6.0) is None
    assert leases.expires_s("n1") == 26.0
    leases.cadence = small
    assert leases.beat("n1", 11.0) == small
    assert leases.expires_s("n1") == 31.0  # it may beat as late as it was told before
    leases.beat("n1", 16.0)
    assert leases.expires_s("n1") == 20.0


def test_no_lease_ends_while_nothing_can_be_stored_nor_for_a_while_after():
    leases = Leases(Cadence(1.0, 4.0), last_tick_s=0.0, not_before_s=0.0)
    leases.beat("n1", 0.0)
    for now_s in range(8):
        leases.pause(float(now_s))
        assert leases.tick(["n1"], float(now_s)) == []
    assert leases.tick(["n1"], 9.0) == [] and leases.tick(["n1"], 11.0) == ["n1"]
