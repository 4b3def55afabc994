"""Seeds of random operations, derived and never stored: equal for every cut of a model. Pure."""

from __future__ import annotations

_MASK = (1 << 64) - 1
LOSS = 0x10_55  # index that the loss function's seed takes in place of an op index


def splitmix64(value: int) -> int:
    """Mix 64 bits. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix(*parts: int) -> int:
    """Return 64 well-mixed bits of `parts`, order included."""
    state = 0
    for part in parts:
        state = splitmix64(state ^ (part & _MASK))
    return state


def chunk_base(seed: int, step: int, chunk: int, replica: int) -> int:
    """Return the base from which every random operation of one chunk derives its seed."""
    return mix(seed, step, chunk, replica)
