"""Which node is meant by what an operator wrote."""

from __future__ import annotations

import pytest

from piped.coordinator.cluster import find_node
from piped.core import events
from piped.errors import NotFoundError, SpecError
from tests.unit.core.build import Cluster, registration


def forgotten():
    """Return a state in which the node id-1, called alpha, was forgotten, and alphb is there."""
    nodes = (registration("alpha", node_id="id-1"), registration("alphb", node_id="id-2"))
    gone = (events.LeaseExpired("id-1", 1), events.ForgetRequested("id-1", "ann", ""))
    return Cluster().feed(*nodes, *gone).state


def test_a_forget_that_is_sent_again_finds_the_node_that_it_forgot():
    assert find_node(forgotten(), "alpha", also_forgotten=True).node_id == "id-1"


def test_a_forgotten_node_is_found_by_no_other_name_and_offered_in_no_hint():
    with pytest.raises(NotFoundError, match="did you mean alphb\\?"):
        find_node(forgotten(), "alpha")


def test_the_newer_node_of_a_name_is_meant_and_not_the_forgotten_one():
    state = Cluster(forgotten()).feed(registration("alpha", node_id="id-3")).state
    assert find_node(state, "alpha", also_forgotten=True).node_id == "id-3"


def test_an_empty_name_is_refused_as_a_field_that_is_missing():
    with pytest.raises(SpecError, match="node"):
        find_node(forgotten(), "")
