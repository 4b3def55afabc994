"""Three nodes with two slots each per module; after each test the invariants hold in the store and in /proc."""

import pytest

from tests.faults.control.scripts import check_invariants
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("control"), nodes=3, slots=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(running):
    yield running
    check_invariants(running)
