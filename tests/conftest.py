"""A cluster for whole-job tests: one per module, since starting it costs a second, importing torch in its workers much more.

Plain loops that a job's numbers are compared with add on one thread, as workers do: two add in another order. The variable counts
where it is set before torch is imported, so it is set here, for what tests start too.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as running:
        yield running
