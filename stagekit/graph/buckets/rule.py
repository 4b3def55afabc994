"""How large the gradient buckets of a stage are. Data only; graph.bucket applies it."""

from __future__ import annotations

from dataclasses import dataclass

from stagekit.errors import UserError


@dataclass(frozen=True, slots=True)
class BucketRule:
    """A bucket is full at `cap_bytes`; the first one, of the last layers, at `first_cap_bytes` if given."""

    cap_bytes: int
    first_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("cap_bytes", "first_cap_bytes"):
            value = getattr(self, name)
            if value is None and name == "first_cap_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}; give bytes as a whole number of at least 1, e.g. 25 << 20")

    def cap_of(self, index: int) -> int:
        """Return the cap of bucket `index`, counted from the last layers."""
        return self.first_cap_bytes if index == 0 and self.first_cap_bytes is not None else self.cap_bytes
