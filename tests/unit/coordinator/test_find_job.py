"""Which job is meant by what a client wrote."""

from __future__ import annotations

import pytest

from piped.coordinator.services import find_job
from piped.core import events
from piped.errors import NotFoundError, WrongStateError
from tests.unit.core.build import Cluster, submission


def test_a_name_means_its_newest_job():
    state = Cluster().feed(submission("j1"), events.CancelRequested("j1"), submission("j2")).state
    assert (find_job(state, "gpt").job_id, find_job(state, "j1").job_id) == ("j2", "j1")
    with pytest.raises(NotFoundError, match=r"did you mean gpt\?"):
        find_job(state, "gtp")


def test_a_name_that_jobs_of_several_tenants_have_needs_the_tenant():
    state = Cluster().feed(submission("j1", tenant="a"), submission("j2", tenant="b")).state
    assert (find_job(state, "a/gpt").job_id, find_job(state, "b/gpt").job_id) == ("j1", "j2")
    with pytest.raises(WrongStateError, match="write a/gpt, b/gpt, or an id"):
        find_job(state, "gpt")
    with pytest.raises(NotFoundError):
        find_job(state, "c/gpt")
