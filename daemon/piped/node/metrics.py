"""What Prometheus reads from a node: the series of piped.metrics, made from snapshots of the workers.

Decides what a series is worth over restarts: a counter or histogram is the sum of the newest snapshot of each worker
of the current attempt and of everything earlier attempts reached, so it never goes back. A job's series end 5 minutes
after its last attempt here. Names that piped.metrics does not list are refused. Fed by piped.node.attempt and
piped.node.supervisor, scraped through piped.node.http; all on one loop.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from piped.metrics import BUCKETS_S, CHILDREN, NODE_METRICS, WORKER_METRICS, Metric
from piped.node.model import DesiredAttempt, DesiredState, Phase

log = structlog.get_logger()

KEEP_S = 300.0
EXIT_REASONS = ("success", "error", "stopped")  # and oom_killed and signal_N, once seen
STATES = ("starting", "running", "stopping", "ended")
_WORKER = {metric.name: metric for metric in WORKER_METRICS}
_SECONDS = ("piped_bubble_seconds",)  # counters that are exposed with their unit before _total

_NONE: Mapping[int, Exemplar] = MappingProxyType({})

Labels = tuple[str, ...]  # values, in the order of the metric's labels
Value = list[float]  # counter or gauge: [value]; histogram: counts of each bucket, then the sum


@dataclass(slots=True)
class Job:
    """One job's series on this node."""

    job_id: str
    fence: int = 0
    attempt: DesiredAttempt | None = None
    state: str = "starting"
    base: dict[str, dict[Labels, Value]] = field(default_factory=dict)  # of earlier attempts
    sources: dict[int, dict[str, dict[Labels, Value]]] = field(default_factory=dict)  # rank -> its newest snapshot
    gauges: dict[str, dict[Labels, float]] = field(default_factory=dict)
    exemplars: dict[str, dict[Labels, dict[int, Exemplar]]] = field(default_factory=dict)  # of any rank, by bucket
    exits: dict[Labels, float] = field(default_factory=dict)
    ended_s: float | None = None


class JobCollector(Collector):
    """Every job's series, and the build's."""

    def __init__(self, node_id: str, node_name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._node_id = node_id
        self._node_name = node_name
        self._now_s = now_s
        self._jobs: dict[str, Job] = {}
        self._refused: set[str] = set()

    # --- what is fed in

    def follow(self, desired: DesiredState, node_id: str) -> None:
        """Take note of the attempts that are wanted here: their shape, state and label children."""
        for attempt in desired.attempts:
            if not attempt.ranks_on(node_id):
                continue
            job = self._job(attempt.job_id, attempt.fence)
            if attempt.fence < job.fence:
                continue
            job.attempt = attempt
            if job.ended_s is None:
                job.state = {Phase.PREPARE: "starting", Phase.RUN: "running", Phase.STOP: "stopping"}[attempt.phase]
            if attempt.phase is Phase.RUN:
                self._begin_at_zero(job, attempt)

    def take_samples(self, job_id: str, fence: int, rank: int, samples: list[dict[str, Any]]) -> None:
        """Take a rank's cumulative samples; of an attempt that is not the newest: nothing.

        Raises ValueError, TypeError or KeyError for a sample that is malformed.
        """
        job = self._job(job_id, fence)
        if fence < job.fence:
            return
        snapshot: dict[str, dict[Labels, Value]] = {}
        for sample in samples:
            metric = _WORKER.get(str(sample["name"]))
            if metric is None:
                self._refuse(str(sample["name"]))
                continue
            labels = _label_values(metric, sample.get("labels") or {})
            if metric.kind == "gauge":
                job.gauges.setdefault(metric.name, {})[labels] = float(sample["value"])
            else:
                snapshot.setdefault(metric.name, {})[labels] = _value(metric, sample)
                job.exemplars.setdefault(metric.name, {}).setdefault(labels, {}).update(_exemplars(sample))
        job.sources[rank] = snapshot

    def count_exit(self, job_id: str, fence: int, rank: int, reason: str) -> None:
        """Count the end of a worker under each of its stages."""
        job = self._job(job_id, fence)
        stages = [p.stages for p in job.attempt.ranks if p.rank == rank] if job.attempt else []
        for stage in stages[0] if stages else ():
            key = (str(stage), reason)
            job.exits[key] = job.exits.get(key, 0.0) + 1.0

    def end_attempt(self, job_id: str, fence: int) -> None:
        """Nothing of the attempt runs here any more: its job's series end in KEEP_S unless another attempt begins."""
        job = self._jobs.get(job_id)
        if job is not None and job.fence <= fence and job.ended_s is None:
            job.ended_s, job.state = self._now_s(), "ended"

    def _job(self, job_id: str, fence: int) -> Job:
        job = self._jobs.setdefault(job_id, Job(job_id, fence))
        if fence > job.fence:  # a restart: what the last attempt reached is the base of the new one
            for name, rows in _total(job).items():
                job.base[name] = rows
            job.sources, job.fence, job.ended_s, job.state = {}, fence, None, "starting"
        return job

    def _begin_at_zero(self, job: Job, attempt: DesiredAttempt) -> None:
        for placement in attempt.ranks_on(self._node_id):
            for stage in placement.stages:
                for reason in EXIT_REASONS:
                    job.exits.setdefault((str(stage), reason), 0.0)
        for metric in WORKER_METRICS:
            if metric.kind == "gauge":
                continue
            for labels in self._children(metric, attempt):
                size = len(BUCKETS_S) + 2 if metric.kind == "histogram" else 1
                job.base.setdefault(metric.name, {}).setdefault(labels, [0.0] * size)

    def _children(self, metric: Metric, attempt: DesiredAttempt) -> Iterator[Labels]:
        """Yield the label values that this node's ranks will report under `metric`."""
        num_stages = 1 + max(stage for placement in attempt.ranks for stage in placement.stages)
        for placement in attempt.ranks_on(self._node_id):
            if "stage" in metric.labels:
                stages: Sequence[str] = [str(stage) for stage in placement.stages]
            elif placement.replica == 0 and num_stages - 1 in placement.stages:
                stages = [""]
            else:
                continue
            for stage in stages:
                for value in CHILDREN.get(metric.name, ("",)):
                    yield tuple({"stage": stage}.get(label, value) for label in metric.labels)

    def _refuse(self, name: str) -> None:
        if name not in self._refused and len(self._refused) < 100:
            self._refused.add(name)
            log.warning("metric_refused", name=name, hint="piped/metrics.py lists every name")

    # --- what is scraped

    def collect(self) -> Iterable[Family]:
        """Yield every family; called for each scrape."""
        now_s = self._now_s()
        for job_id in [j.job_id for j in self._jobs.values() if j.ended_s is not None and now_s - j.ended_s > KEEP_S]:
            del self._jobs[job_id]
        yield _build_info()
        totals = {job_id: _total(job) for job_id, job in self._jobs.items()}
        for metric in WORKER_METRICS:
            yield self._worker_family(metric, totals)
        yield from self._node_families()

    def _worker_family(self, metric: Metric, totals: Mapping[str, Mapping[str, Mapping[Labels, Value]]]) -> Family:
        family = _family(metric)
        for job_id, job in self._jobs.items():
            if metric.kind == "gauge":
                for labels, number in job.gauges.get(metric.name, {}).items():
                    _add(family, (job_id, *labels), [number])
            for labels, value in totals[job_id].get(metric.name, {}).items():
                _add(family, (job_id, *labels), value, job.exemplars.get(metric.name, {}).get(labels, {}))
        return family

    def _node_families(self) -> Iterator[Family]:
        families = {metric.name: _family(metric) for metric in NODE_METRICS}
        for job in self._jobs.values():
            for state in STATES:
                _add(families["piped_job_state"], (job.job_id, state), [float(job.state == state)])
            for labels, count in job.exits.items():
                _add(families["piped_worker_exits"], (job.job_id, *labels), [count])
            if job.attempt is not None:
                _add(families["piped_job_attempt"], (job.job_id,), [float(job.attempt.attempt)])
                _add(families["piped_job_info"], (job.job_id, *_shape(job.attempt)), [1.0])
                for p in job.attempt.ranks_on(self._node_id):
                    for stage in p.stages:
                        row = (job.job_id, str(stage), str(p.rank), self._node_name, p.slot.device)
                        _add(families["piped_worker_info"], row, [1.0])
        yield from families.values()


def registry(collector: JobCollector) -> CollectorRegistry:
    """Return a registry of `collector` alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(collector)
    return made


def _total(job: Job) -> dict[str, dict[Labels, Value]]:
    total = {name: {labels: list(value) for labels, value in rows.items()} for name, rows in job.base.items()}
    for snapshot in job.sources.values():
        for name, rows in snapshot.items():
            into = total.setdefault(name, {})
            for labels, value in rows.items():
                known = into.get(labels)
                into[labels] = [a + b for a, b in zip(known, value, strict=True)] if known else list(value)
    return total


def _label_values(metric: Metric, labels: Mapping[str, Any]) -> Labels:
    if set(labels) != set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    return tuple(str(labels[name]) for name in metric.labels)


def _value(metric: Metric, sample: Mapping[str, Any]) -> Value:
    if metric.kind == "counter":
        numbers = [float(sample["value"])]
    else:
        numbers = [float(count) for count in sample["buckets"]] + [float(sample["sum"])]
        if len(numbers) != len(BUCKETS_S) + 2:
            raise ValueError(f"{metric.name}: {len(numbers) - 1} buckets, {len(BUCKETS_S) + 1} are needed")
    if any(not math.isfinite(number) or number < 0 for number in numbers):
        raise ValueError(f"{metric.name}: a counter that is negative or not finite")
    return numbers


def _family(metric: Metric) -> Family:
    labels = ("job_id", *metric.labels)
    match metric.kind:
        case "counter":
            return CounterMetricFamily(metric.name, metric.help, labels=labels)
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.help, labels=labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.help, labels=labels)


def _exemplars(sample: Mapping[str, Any]) -> dict[int, Exemplar]:
    return {
        int(bucket): Exemplar({"step": str(int(step)), "chunk": str(int(chunk))}, float(value))
        for bucket, step, chunk, value in sample.get("exemplars") or ()
    }


def _add(family: Family, labels: Labels, value: Value, exemplars: Mapping[int, Exemplar] = _NONE) -> None:
    if isinstance(family, HistogramMetricFamily):
        counts = 0.0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for number, (edge, count) in enumerate(zip((*map(str, BUCKETS_S), "+Inf"), value, strict=False)):
            counts += count
            exemplar = exemplars.get(number)
            buckets.append((edge, counts) if exemplar is None else (edge, counts, exemplar))
        family.add_metric(labels, buckets=buckets, sum_value=value[-1])
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(labels, value[0])


def _shape(attempt: DesiredAttempt) -> Labels:
    pipeline = attempt.spec.get("pipeline") or {}
    named = (attempt.spec.get("name"), pipeline.get("schedule"), pipeline.get("stages"), pipeline.get("chunks"))
    return (*(str(part if part is not None else "") for part in named), str(len(attempt.ranks)))


def _build_info() -> Family:
    family = GaugeMetricFamily(
        "piped_build_info", "Constant 1: what runs here.", labels=("version", "torch_version", "python_version")
    )
    family.add_metric((_version("pipectl"), _version("torch"), platform.python_version()), 1.0)
    return family


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
