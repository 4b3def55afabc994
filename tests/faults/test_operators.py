"""What operators do to nodes on which real workers run: they are stopped with grace, nothing is left, the job starts anew.

Bounds: a drained node has no process of any job when `pipectl drain` returns; the job's losses are those of an undisturbed run.
"""

from tests.faults.jobs import at_step, job
from tests.support.cluster import Cluster, wait_for_no_process_of


def test_a_drained_node_is_empty_when_the_command_returns_and_its_job_runs_elsewhere_with_the_same_losses(
    tmp_path, losses
):
    with Cluster(tmp_path, nodes=0) as cluster:
        first, second = (cluster.add_node(2, "--label", f"rack={rack}", "--label", "zone=x").name for rack in "ab")
        job_id = cluster.submit(job("moved", pause_s=0.1, resources={"node_selector": {"zone": "x"}}))
        at_step(cluster, job_id, 3)
        assert {each.node_name for each in cluster.api.get(job_id).workers} == {first}
        done = cluster.pipectl("drain", first, "--deadline", "0", "--why", "new disk")
        assert done.returncode == 0, done.stderr
        assert not wait_for_no_process_of(None, cluster.markers_on(first), timeout_s=0.0)
        ended = cluster.wait_for(job_id, "SUCCEEDED")
        assert (ended.attempt, {each.node_name for each in ended.workers}) == (2, {second})
        assert cluster.losses(job_id) == losses
        listed = cluster.pipectl("get", "nodes", "-o", "wide").stdout
        assert "new disk; empty" in listed and "rack=b,zone=x" in listed
        cluster.check_no_leak()
