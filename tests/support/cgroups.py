"""What this machine's cgroups allow: the product works without them, and tells less."""

from __future__ import annotations

import uuid

from piped.cgroup import own_group


def can_divide() -> bool:
    """Say whether a rank started here gets a memory cgroup of its own."""
    group = own_group()
    if group is None:
        return False
    try:
        return group.leaf(str(uuid.uuid4()), 0, 1 << 30).remove()
    except OSError:
        return False
