"""One cluster per module, and the leak check after each of its tests."""

import pytest

from tests.faults.jobs import job
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def losses(tmp_path_factory):
    """The losses of an undisturbed run."""
    with Cluster(tmp_path_factory.mktemp("undisturbed"), nodes=1, slots=2) as cluster:
        return cluster.losses(cluster.run(job("undisturbed")).job_id)


@pytest.fixture
def cluster(running, losses):
    """The module's cluster; after the test nothing of its jobs may be left, whatever was killed."""
    yield running
    running.check_no_leak()
