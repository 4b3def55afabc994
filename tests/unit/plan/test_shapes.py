"""Shape expressions, chunk sizes and seeds."""

import pytest

from stagekit.errors import BugError, ShapeError
from stagekit.plan.seeds import chunk_base, mix
from stagekit.plan.shapes import chunk_sizes, evaluate, holds


@pytest.mark.parametrize(
    ("expression", "size"),
    [
        *[
            (7, 7),
            ("s0", 4),
            ("2*s0 + 1", 9),
            ("(s0*s1)//3", 8),
            ("Max(1, s0 - 9)", 1),
            ("s0**2", 16),
            ("Mod(s1, 4)", 2),
        ],
        *[("max(7, s1)", 7), ("min(s0, s1)", 4), ("math.trunc(0.75*float(s1))", 4), ("math.ceil(s1 / 4)", 2)],
        *[("6*max(1, (-4) + s1)", 12), ("round(s0 / 3)", 1), ("s1 & 3", 2), ("abs(s0 + (-s1))", 2)],
    ],
)
def test_shape_expressions_are_evaluated(expression, size):
    assert evaluate(expression, {"s0": 4, "s1": 6}) == size


def test_an_expression_that_is_none_is_our_bug():
    with pytest.raises(BugError, match="__import__"):
        evaluate("__import__('os')", {})


@pytest.mark.parametrize(
    ("condition", "is_true"),
    [
        ("max(7, s1) == 7", True),
        ("0.75*float(s1) < 4.0", False),
        ("(s1 / 2) > 2.0", True),
        ("s0 // (s1 - 6) > 1", False),
    ],
)
def test_conditions_on_sizes_are_decided(condition, is_true):
    assert holds(condition, {"s0": 4, "s1": 6}) is is_true


@pytest.mark.parametrize("condition", ["median(s0) == 4", "s0 < s7"])
def test_a_condition_that_nobody_can_decide_does_not_count_as_true(condition):
    with pytest.raises(BugError, match="is unknown"):
        holds(condition, {"s0": 4, "s1": 6})


def test_chunk_sizes_differ_by_at_most_one_and_larger_ones_come_first():
    assert chunk_sizes(10, 4) == (3, 3, 2, 2)
    assert chunk_sizes(8, 4) == (2, 2, 2, 2)


def test_fewer_rows_than_chunks_are_refused_with_both_numbers():
    with pytest.raises(ShapeError, match=r"3 rows .* 4 chunks; use at most 3"):
        chunk_sizes(3, 4)


def test_seeds_differ_in_every_part_and_are_stable():
    bases = {
        chunk_base(seed, step, chunk, replica)
        for seed in (0, 1)
        for step in (0, 1)
        for chunk in (0, 1)
        for replica in (0, 1)
    }
    assert len(bases) == 16
    assert mix(1, 2) != mix(2, 1)
    assert chunk_base(1234, 5, 6, 0) == chunk_base(1234, 5, 6, 0)
