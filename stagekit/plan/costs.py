"""What a schedule's actions cost: times per stage, of a hop, and what an activation keeps after its I. One unit for all.

`Link` says what a message and an action cost beside the stage, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of each stage's F, I and W, and of a hop between two ranks; of a full backward I + W if not told.

    `kept` is the share of an activation that is held between its I and its W.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    hop: float = 0.0
    kept: float = 1.0
    backward: tuple[float, ...] = ()

    @classmethod
    def unit(cls, num_stages: int) -> Costs:
        """Return costs of 1 for F, I and W, and none for hops."""
        return cls((1.0,) * num_stages, (1.0,) * num_stages, (1.0,) * num_stages)

    @property
    def full_backward(self) -> tuple[float, ...]:
        """Time of each stage's B."""
        return self.backward or tuple(i + w for i, w in zip(self.input_grad, self.weight_grad, strict=True))


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between two ranks takes, and what the executor takes for each compute action."""

    latency_s: float = 70e-6  # a small gloo message between two processes of a host, measured 38-71 µs
    bytes_per_s: float = 3e9  # a 1 MiB gloo message, measured 3-6 GB/s
    action_s: float = 40e-6  # main-thread CPU per compute action above the bare stage, measured 33-46 µs

    def hop_s(self, size_bytes: float) -> float:
        """Return the seconds of a message of `size_bytes`."""
        return self.latency_s + size_bytes / self.bytes_per_s
