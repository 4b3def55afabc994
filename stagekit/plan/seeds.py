"""Seeds of random operations, derived and never stored: equal for every cut of a model. Pure."""

from __future__ import annotations

_MASK = (1 << 64) - 1
LOSS = 0x10_55  # index that the loss function's seed takes in place of an op index


def mix(*parts: int) -> int:
    """Return 64 well-mixed bits of `parts`, order included: splitmix64 over each of them in turn.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def chunk_base(seed: int, step: int, chunk: int, replica: int) -> int:
    """Return the base from which every random operation of one chunk derives its seed; it fits into an int64."""
    return mix(seed, step, chunk, replica) & (_MASK >> 1)


def loss_seed(base: int) -> int:
    """Return the seed of the loss function of the chunk with that base."""
    return mix(base, LOSS) & 0xFFFFFFFF
