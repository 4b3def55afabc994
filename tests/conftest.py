"""A cluster for whole-job tests: one per module, since starting it costs a second, importing torch in its workers much more."""

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as running:
        yield running
