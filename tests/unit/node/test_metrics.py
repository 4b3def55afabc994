"""The collector: series that never go back, begin at zero and end."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from prometheus_client.exposition import generate_latest

from piped.metrics import BUCKETS_S
from piped.node.metrics import KEEP_S, JobCollector, registry
from piped.node.model import DesiredAttempt, DesiredState, Phase, RankPlacement, Slot

SPEC = {"name": "gpt", "pipeline": {"stages": 2, "schedule": "1f1b", "chunks": 8}}
RANKS = (
    RankPlacement(0, 0, (0,), "me", "n1", Slot(0, "cpu:0")),
    RankPlacement(1, 0, (1,), "other", "n2", Slot(0, "cpu:0")),
)
RUN = DesiredAttempt(1, "j1", 1, Phase.RUN, SPEC, ranks=RANKS)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def collector(attempt: DesiredAttempt = RUN, clock: Clock | None = None) -> JobCollector:
    made = JobCollector("me", "n1", clock or Clock())
    made.follow(DesiredState(1, (attempt,)), "me")
    return made


def value(made: JobCollector, name: str, **labels: str) -> float | None:
    return registry(made).get_sample_value(name, {"job_id": "j1", **labels})


def counter(number: float) -> list[dict[str, object]]:
    return [{"name": "piped_p2p_bytes", "labels": {"stage": "0", "direction": "send_forward"}, "value": number}]


def read(made: JobCollector) -> float | None:
    return value(made, "piped_p2p_bytes_total", stage="0", direction="send_forward")


def test_a_counter_goes_on_over_a_restart() -> None:
    made = collector()
    made.take_samples("j1", 1, 0, counter(100))
    made.take_samples("j1", 1, 0, counter(150))
    made.follow(DesiredState(2, (replace(RUN, fence=2, attempt=2),)), "me")
    assert read(made) == 150
    made.take_samples("j1", 2, 0, counter(10))
    assert read(made) == 160
    made.take_samples("j1", 1, 0, counter(9999))  # yesterday's worker
    assert read(made) == 160
    assert value(made, "piped_job_attempt") == 2


def test_two_ranks_with_the_same_series_are_summed() -> None:
    made = collector()
    made.take_samples("j1", 1, 0, counter(100))
    made.take_samples("j1", 1, 5, counter(11))
    assert read(made) == 111


def test_every_child_of_this_nodes_stages_starts_at_zero() -> None:
    made = collector()
    assert read(made) == 0
    assert value(made, "piped_chunk_duration_seconds_count", stage="0", phase="backward") == 0
    assert value(made, "piped_chunk_duration_seconds_count", stage="1", phase="backward") is None  # another node's
    assert value(made, "piped_steps_total") is None  # of the node with the last stage of replica 0


def test_job_level_series_come_from_the_last_stage_of_replica_0() -> None:
    here = replace(RUN, ranks=(replace(RANKS[0], node_id="other"), replace(RANKS[1], node_id="me")))
    assert value(collector(here), "piped_steps_total") == 0
    assert value(collector(here), "piped_step_duration_seconds_count") == 0


def test_a_histogram_is_exposed_with_cumulative_buckets() -> None:
    made = collector()
    counts = [0.0] * (len(BUCKETS_S) + 1)
    counts[0], counts[3], counts[-1] = 1.0, 2.0, 4.0
    sample = {"name": "piped_grad_sync_seconds", "labels": {"stage": "0"}, "buckets": counts, "sum": 60.5}
    made.take_samples("j1", 1, 0, [sample])
    assert value(made, "piped_grad_sync_seconds_bucket", stage="0", le="0.0001") == 1
    assert value(made, "piped_grad_sync_seconds_bucket", stage="0", le="0.001") == 3
    assert value(made, "piped_grad_sync_seconds_bucket", stage="0", le="+Inf") == 7
    assert value(made, "piped_grad_sync_seconds_count", stage="0") == 7
    assert value(made, "piped_grad_sync_seconds_sum", stage="0") == 60.5


@pytest.mark.parametrize(
    "sample",
    [
        {"name": "piped_p2p_bytes", "labels": {"stage": "0"}, "value": 1},
        {"name": "piped_p2p_bytes", "labels": {"stage": "0", "direction": "x"}, "value": -1},
        {"name": "piped_p2p_bytes", "labels": {"stage": "0", "direction": "x"}, "value": float("nan")},
        {"name": "piped_grad_sync_seconds", "labels": {"stage": "0"}, "buckets": [1, 2], "sum": 3},
    ],
)
def test_a_malformed_sample_is_refused(sample: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"piped_p2p_bytes|piped_grad_sync_seconds"):
        collector().take_samples("j1", 1, 0, [sample])


def test_a_name_that_is_not_ours_is_not_exposed() -> None:
    made = collector()
    made.take_samples("j1", 1, 0, [{"name": "evil", "labels": {}, "value": 1}, *counter(3)])
    assert b"evil" not in generate_latest(registry(made))
    assert read(made) == 3


def test_a_jobs_series_end_five_minutes_after_its_end() -> None:
    clock = Clock()
    made = collector(clock=clock)
    made.end_attempt("j1", 1)
    assert value(made, "piped_job_state", state="ended") == 1
    assert value(made, "piped_worker_info", stage="0", rank="0", node="n1", device="cpu:0") == 1
    clock.now_s = KEEP_S
    assert read(made) == 0
    clock.now_s = KEEP_S + 1
    assert read(made) is None


def test_a_restart_within_that_time_keeps_them() -> None:
    clock = Clock()
    made = collector(clock=clock)
    made.take_samples("j1", 1, 0, counter(5))
    made.end_attempt("j1", 1)
    made.follow(DesiredState(2, (replace(RUN, fence=2, attempt=2),)), "me")
    assert value(made, "piped_worker_info", stage="0", rank="0", node="n1", device="cpu:0") == 1
    assert read(made) == 5


def test_exits_are_counted_per_stage_and_reason() -> None:
    made = collector()
    made.count_exit("j1", 1, 0, "signal_9")
    assert value(made, "piped_worker_exits_total", stage="0", reason="signal_9") == 1


def test_the_exposition_passes_promtool() -> None:
    made = collector()
    made.take_samples("j1", 1, 0, [*counter(1), {"name": "piped_loss", "labels": {}, "value": float("inf")}])
    made.count_exit("j1", 1, 0, "error")
    lint = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(registry(made)), capture_output=True)
    assert (lint.returncode, lint.stderr) == (0, b"")
