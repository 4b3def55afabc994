"""Every metric of a node, once: name, kind, labels, help. Standard library only.

Workers send cumulative samples under these names (without job_id, which the daemon adds); the daemon's collector
exposes them and refuses any other name. Durations are in seconds, buckets 1-2-5 from 100 µs to 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUCKETS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family; counters are named without their exposition suffix `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


# From the workers. Series without a stage label come from the last stage of replica 0 only, else sums multiply.
WORKER_METRICS = (
    Metric(
        "piped_chunk_duration_seconds",
        "histogram",
        "Compute of one chunk in one stage; its backward is either whole, or in two halves (phases backward_input and "
        "backward_weight).",
        ("stage", "phase"),
    ),
    Metric(
        "piped_chunk_latency_seconds",
        "histogram",
        "A chunk's way through the pipeline: first stage's start to last stage's forward end (phase forward), "
        "from there to the first stage's backward end (phase backward).",
        ("phase",),
    ),
    Metric("piped_p2p_wait_seconds", "histogram", "Time a stage waited for a transfer.", ("stage", "direction")),
    Metric("piped_p2p_bytes", "counter", "Bytes handed to the transport.", ("stage", "direction")),
    Metric(
        "piped_grad_sync_seconds", "histogram", "All-reduce of one stage's gradients over its replicas.", ("stage",)
    ),
    Metric(
        "piped_grad_sync_exposed_seconds",
        "histogram",
        "Time of a step that a stage's rank waited for that all-reduce, with nothing left to compute (not measured in "
        "stages that DistributedDataParallel wraps).",
        ("stage",),
    ),
    Metric("piped_optimizer_duration_seconds", "histogram", "Optimizer step of one stage.", ("stage",)),
    Metric("piped_bubble_seconds", "counter", "Time of a step in which the stage's rank did not compute.", ("stage",)),
    Metric("piped_step_duration_seconds", "histogram", "One training step, optimizer included."),
    Metric("piped_steps", "counter", "Training steps finished."),
    Metric("piped_samples", "counter", "Rows trained on."),
    Metric("piped_tokens", "counter", "Tokens trained on (rows where the program has no tokens)."),
    Metric("piped_loss", "gauge", "Loss of the last step, weighted over chunks and replicas."),
    Metric("piped_job_expected_bubble_ratio", "gauge", "Bubble that the plan's simulator predicts."),
    Metric("piped_job_expected_step_seconds", "gauge", "Step time that the plan's simulator predicts."),
    Metric("piped_job_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step."),
)

# Made by the node daemon from what the coordinator wants and what it observes.
NODE_METRICS = (
    Metric(
        "piped_job_info",
        "gauge",
        "Constant 1 with the job's shape.",
        ("name", "schedule", "stages", "chunks", "world_size"),
    ),
    Metric("piped_worker_info", "gauge", "Constant 1: where a stage runs.", ("stage", "rank", "node", "device")),
    Metric("piped_job_state", "gauge", "1 for the state that the job is in on this node, else 0.", ("state",)),
    Metric("piped_job_attempt", "gauge", "Number of the attempt."),
    Metric("piped_worker_exits", "counter", "Workers that ended.", ("stage", "reason")),
)

PHASES = ("forward", "backward", "backward_input", "backward_weight")  # of a chunk in a stage
WAYS = ("forward", "backward")  # of a chunk through the pipeline
DIRECTIONS = ("recv_forward", "recv_backward", "send_forward", "send_backward")
CHILDREN = {  # by metric: the values of its label beside the stage
    "piped_chunk_duration_seconds": PHASES,
    "piped_chunk_latency_seconds": WAYS,
    "piped_p2p_wait_seconds": DIRECTIONS,
    "piped_p2p_bytes": DIRECTIONS,
}
