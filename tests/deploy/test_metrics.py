"""What a real Prometheus sees of a real job: counts that match the plan, and every expression that we ship."""

import subprocess
import time
import urllib.request

import pytest

from tests.support.cluster import wait_until
from tests.support.prometheus import Prometheus, dashboard_expressions, rule_expressions

STEPS, CHUNKS, STAGES = 40, 4, 4


@pytest.fixture(scope="module")
def seen(cluster, tmp_path_factory):
    """(Prometheus, the ended job): scraped while it ran, and once more after its end."""
    http = cluster.coordinator.endpoints["http"]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"http://{http}/sd/prometheus") as server:
        spec = {
            "version": 1,
            "name": "measured",
            "program": "stagekit.examples.gpt:Program",
            "params": {"layers": 4, "width": 32, "heads": 2, "sequence": 32, "batch": 8},
            "pipeline": {"stages": STAGES, "chunks": CHUNKS},
            "train": {"steps": STEPS, "seed": 3},
        }
        job_id = cluster.submit(spec)
        cluster.wait_for(job_id, "RUNNING", "SUCCEEDED")
        ended = cluster.wait_for(job_id, "SUCCEEDED")
        end = time.time()
        wait_until(
            lambda: min(server.values("timestamp(up)", "instance").values()) > end,
            15,
            "a scrape of every page after it",
        )
        yield server, ended


def test_every_metrics_page_passes_promtool(cluster, seen):
    pages = [cluster.coordinator.endpoints["http"], *(node.endpoints["metrics"] for node in cluster.nodes)]
    for address in pages:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text = response.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), address


def test_service_discovery_lists_the_coordinator_and_every_node(seen):
    server, _ = seen
    assert server.values("up", "node").keys() == {"", "node0", "node1"}
    assert set(server.values("up", "node").values()) == {1.0}


def test_forwards_and_backwards_are_counted_once_per_chunk_and_step_on_every_stage(seen):
    server, job = seen
    for phase in ("forward", "backward"):
        counts = server.values(f'piped_chunk_duration_seconds_count{{job_id="{job.job_id}",phase="{phase}"}}', "stage")
        assert counts == {str(stage): STEPS * CHUNKS for stage in range(STAGES)}


def test_an_exemplar_says_which_step_and_chunk_took_that_long(seen):
    server, job = seen
    for name in ("piped_chunk_duration_seconds_bucket", "piped_chunk_latency_seconds_bucket"):
        found = server.exemplars(f'{name}{{job_id="{job.job_id}"}}')
        assert found, name
        assert all(0 <= int(labels["chunk"]) < CHUNKS and 0 <= int(labels["step"]) < STEPS for labels in found), name


def test_bytes_between_stages_are_those_of_the_plan(seen):
    server, job = seen
    sent = server.values(f'piped_p2p_bytes_total{{job_id="{job.job_id}",direction="send_forward"}}', "stage")
    received = server.values(f'piped_p2p_bytes_total{{job_id="{job.job_id}",direction="recv_forward"}}', "stage")
    returned = server.values(f'piped_p2p_bytes_total{{job_id="{job.job_id}",direction="send_backward"}}', "stage")
    planned = {str(stage.index): STEPS * CHUNKS * stage.output_bytes for stage in job.plan.stages}
    assert sent == planned
    assert planned["0"] > 0 and planned["3"] == 0
    for stage in range(1, STAGES):
        assert received[str(stage)] == returned[str(stage)] == planned[str(stage - 1)]


def test_a_chunks_whole_way_is_longer_than_its_longest_stage(seen):
    server, job = seen
    mine = f'{{job_id="{job.job_id}"}}'
    counts = server.values(f"piped_chunk_latency_seconds_count{mine}", "phase")
    assert counts == {"forward": STEPS * CHUNKS, "backward": STEPS * CHUNKS}
    sums = server.values(f"piped_chunk_latency_seconds_sum{mine}", "phase")
    stages = server.values(f'piped_chunk_duration_seconds_sum{{job_id="{job.job_id}",phase="forward"}}', "stage")
    assert sums["forward"] > sum(stages.values())


def test_the_loss_in_prometheus_is_the_recorded_one(cluster, seen):
    server, job = seen
    assert server.values(f'piped_loss{{job_id="{job.job_id}"}}', "") == {"": cluster.losses(job.job_id)[-1]}


def test_every_expression_of_every_dashboard_and_rule_returns_data(seen):
    server, job = seen
    silent = []
    for name, expression in (dashboard_expressions(job.job_id) | rule_expressions()).items():
        rows = server.query(expression)
        jobs = {row["metric"]["job_id"] for row in rows if "job_id" in row["metric"]}
        if not rows or (jobs and job.job_id not in jobs) or all(row["value"][1] == "NaN" for row in rows):
            silent.append(f"{name}: {expression} → {rows[:2]}")
    assert silent == []
    assert "vector(0)" not in "".join((dashboard_expressions(job.job_id) | rule_expressions()).values())
