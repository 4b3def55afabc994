"""One rank of two fails in each way there is: it is named with its own words, on its neighbour's node and on another."""

from pathlib import Path

import pytest

from pipeapi.v1 import jobs_pb2
from tests.support.cluster import Cluster

PROGRAMS = Path(__file__).parent / "programs"
WAYS = {  # how it ends: the reason, the rank that is blamed, what is told
    "exit 7": ("USER_ERROR", 1, "exited with code 7"),
    "exit 0": ("USER_ERROR", 1, "exited 0 before it said that it was done"),
    "exception": ("USER_ERROR", 1, "ValueError: told by itself"),
    "SIGKILL": ("SIGNALLED", 1, "killed by signal 9"),
    "SIGSEGV": ("SIGNALLED", 1, "killed by signal 11"),
    "NaN": ("NUMERIC", -1, "the loss is nan in step 1"),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What all the jobs ended with, by placement and way; they run side by side."""
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as cluster:
        ids = {(place, how): cluster.submit(job(place, how)) for place in ("same node", "other node") for how in WAYS}
        yield {key: cluster.wait_for(job_id, "FAILED") for key, job_id in ids.items()}
        cluster.check_no_leak()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("place", ["same node", "other node"])
def test_the_rank_that_failed_is_named_with_its_own_words_and_never_its_neighbour(failures, place, how):
    ended = failures[place, how]
    reason, rank, told = WAYS[how]
    assert len({worker.node_name for worker in ended.workers}) == (1 if place == "same node" else 2)
    failure = ended.failure
    assert (jobs_pb2.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_"), failure.rank) == (reason, rank)
    assert told in failure.message and "not known" not in failure.message
    assert how != "exception" or "in loss" in failure.traceback


def job(place, how):
    return {
        "version": 1,
        "name": f"{place} {how}".lower().replace(" ", "-"),
        "program": "ends:Ends",
        "source": str(PROGRAMS),
        "params": {"how": how},
        "pipeline": {"stages": 2, "chunks": 2},
        "resources": {"slots_per_node": 2 if place == "same node" else 1},
        "train": {"steps": 9},
    }
