"""Where workers listen is one host's alone; the node that is missed is the one that gets no more of a job."""

import pytest

from piped.core import events
from piped.errors import RegistrationRefused
from tests.unit.core.build import Cluster, cluster, registration, submission

HERE = "10.0.0.1"


def test_two_hosts_with_one_data_address_are_told_apart_by_refusing_the_second_naming_both():
    c = Cluster().feed(registration("n1", data_address=HERE, host_key="boot1 8:1"))
    with pytest.raises(RegistrationRefused, match=r"'n2' and 'n1' have the same data_address 10.0.0.1 on two hosts"):
        c.feed(registration("n2", data_address=HERE, host_key="boot2 8:1"))


@pytest.mark.parametrize(
    ("address", "host_key"), [(HERE, "boot1 8:2"), ("127.0.0.1", "boot2 8:1"), ("::1", "boot2 8:1")]
)
def test_daemons_of_one_host_share_its_address_and_loopback_is_each_hosts_own(address, host_key):
    c = Cluster().feed(registration("n1", data_address=address, host_key="boot1 8:1"))
    c.feed(registration("n2", data_address=address, host_key=host_key))
    assert set(c.state.nodes) == {"n1", "n2"}


def test_a_node_may_come_back_with_its_address_after_a_reboot():
    c = Cluster().feed(registration("n1", data_address=HERE, host_key="boot1 8:1"), events.LeaseExpired("n1", 1))
    c.feed(registration("n1", data_address=HERE, host_key="boot2 8:1"))
    assert c.state.nodes["n1"].incarnation == 2


def test_a_node_that_another_one_does_not_reach_is_left_out_of_the_next_attempt_and_the_other_is_not():
    c = cluster(1, 1, 1).feed(submission(stages=2))
    first, second = c.state.attempts[1].node_ids
    c.feed(events.PrepareRefused(first, 1, f"{second} (stage 1 of rank 1) is not reached", peer_id=second))
    c.feed(events.AttemptEmptied(first, 1), events.AttemptEmptied(second, 1))
    assert set(c.state.attempts[2].node_ids) == set(c.state.nodes) - {second}


def measured(c, **wires):
    """Take the wires "n1_n2" of so many bytes per second."""
    for pair, rate in wires.items():
        one, _, other = pair.partition("_")
        c.feed(events.WiresMeasured(one, ((other, rate),)))
    return c


def on(c, fence):
    return [each.node_id for each in c.state.attempts[fence].placement]


def test_of_equal_nodes_those_on_fast_wires_are_taken_and_neighbours_sit_on_them():
    c = measured(cluster(1, 1, 1, 1), n1_n2=1e8, n1_n3=1e9, n1_n4=1e8, n2_n3=1e8, n2_n4=1e9, n3_n4=1e8)
    assert on(c.feed(submission(stages=2)), 1) == ["n1", "n3"]
    c = measured(cluster(1, 1, 1, 1), n1_n2=1e8, n1_n3=1e9, n1_n4=1e8, n2_n3=1e8, n2_n4=1e9, n3_n4=1e9)
    assert on(c.feed(submission(stages=4)), 1) == ["n1", "n3", "n4", "n2"]


def test_small_differences_and_wires_that_nobody_measured_change_no_placement():
    c = measured(cluster(1, 1, 1), n1_n2=1.0e9, n1_n3=1.2e9)
    assert on(c.feed(submission(stages=2)), 1) == ["n1", "n2"]
    c = measured(cluster(1, 1, 1), n1_n3=1.0e9)
    assert on(c.feed(submission(stages=2)), 1) == ["n1", "n2"]


def test_fewest_nodes_come_before_fast_wires_and_wires_of_strangers_are_left_out():
    c = measured(cluster(1, 1, 2), n1_n2=1e12, n1_n9=1e12)
    assert set(on(c.feed(submission(stages=2)), 1)) == {"n3"}
    assert set(c.state.wires) == {("n1", "n2")}
