"""Cumulative samples of one worker, in the shape that travels (piped.lines, `metrics`). Names: piped.metrics."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from piped.metrics import BUCKETS_S, WORKER_METRICS

_KINDS = {metric.name: metric.kind for metric in WORKER_METRICS}
Labels = tuple[tuple[str, str], ...]


class Samples:
    """Counters, gauges and histograms by name and labels. Not thread-safe: the training thread writes and snapshots."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], tuple[list[int], list[float]]] = {}
        self._exemplars: dict[tuple[str, Labels], dict[int, tuple[int, int, float]]] = {}  # newest, by bucket

    def declare(self, name: str, **labels: str) -> None:
        """Let a series exist, at zero."""
        key = (name, tuple(labels.items()))
        if _KINDS[name] == "histogram":
            self._histograms.setdefault(key, ([0] * (len(BUCKETS_S) + 1), [0.0]))
        else:
            self._values.setdefault(key, 0.0)

    def observe(self, name: str, value: float, *, exemplar: tuple[int, int] | None = None, **labels: str) -> None:
        """Add one observation to a histogram; `exemplar` says of which (step, chunk) it is."""
        key = (name, tuple(labels.items()))
        if key not in self._histograms:
            self.declare(name, **labels)
        counts, total = self._histograms[key]
        bucket = bisect_left(BUCKETS_S, value)
        counts[bucket] += 1
        total[0] += value
        if exemplar is not None:
            self._exemplars.setdefault(key, {})[bucket] = (*exemplar, value)

    def add(self, name: str, value: float, **labels: str) -> None:
        """Increase a counter."""
        key = (name, tuple(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        self._values[name, tuple(labels.items())] = value

    def snapshot(self) -> list[dict[str, Any]]:
        """Return everything, cumulative since the start."""
        samples: list[dict[str, Any]] = [
            {"name": name, "labels": dict(labels), "value": value} for (name, labels), value in self._values.items()
        ]
        samples += [
            {"name": name, "labels": dict(labels), "buckets": list(counts), "sum": total[0]}
            | self._exemplars_of((name, labels))
            for (name, labels), (counts, total) in self._histograms.items()
        ]
        return samples

    def _exemplars_of(self, key: tuple[str, Labels]) -> dict[str, Any]:
        found = self._exemplars.get(key)
        return {"exemplars": [[bucket, *exemplar] for bucket, exemplar in found.items()]} if found else {}
