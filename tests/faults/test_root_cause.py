"""One rank of two fails in each way there is: it is named with its own words, on its neighbour's node and on another."""

import pytest

from tests.faults import matrix

HOUR_S = 3600


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of all the jobs, which run side by side; one node's clock is an hour ahead."""
    with matrix.fleet(tmp_path_factory.mktemp("cluster"), HOUR_S) as cluster:
        yield {(each.way, each.place): each for each in matrix.run(cluster, matrix.CELLS)}
        cluster.check_no_leak()


@pytest.mark.parametrize(("way", "place"), matrix.CELLS)
def test_the_rank_that_failed_is_named_with_its_own_words_and_never_its_neighbour(outcomes, way, place):
    outcome = outcomes[way, place]
    assert outcome.is_placed_right
    assert outcome.verdict == "right", (outcome.reason, outcome.failure)
    assert way != "exception" or "in loss" in outcome.failure.traceback


@pytest.mark.soak
@pytest.mark.parametrize("clock_s", [HOUR_S, -HOUR_S])
def test_of_twenty_each_99_percent_are_right_and_none_is_wrong_with_certainty(tmp_path, clock_s):
    with matrix.fleet(tmp_path, clock_s) as cluster:
        outcomes = list(matrix.run(cluster, matrix.ALL_CELLS, repeats=20))
        cluster.check_no_leak()
    print(table := matrix.table(outcomes))
    verdicts = [each.verdict for each in outcomes]
    ties = [each for each in outcomes if each.verdict == "tie"]
    assert "wrong" not in verdicts, table
    assert verdicts.count("right") >= 0.99 * len(outcomes), table
    assert not [each for each in ties if each.place == matrix.SAME], table
