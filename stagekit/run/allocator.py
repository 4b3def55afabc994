"""Keep the memory that a step frees for the next step. Called once by processes that train or measure.

glibc returns what lies on top of the heap to the system at once, so that every step faults its activations in again: a
convnet's forward took twice its time. The peak is the same; other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 << 20  # glibc's own upper limit; larger blocks are mapped one by one
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to 2 GiB of freed memory; return whether it did."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
