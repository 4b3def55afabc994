"""What a schedule's actions cost: times per stage, of a hop, and what an activation keeps after its I. One unit for all."""

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
