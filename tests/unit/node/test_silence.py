"""For how long a rank has said nothing: by its shim's word, which alone listens to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from piped.node import attempt as attempts
from piped.node.attempt import Attempt
from piped.node.attempt_dir import AttemptDir
from piped.node.facts import FactBook


class Uncounted:
    """A meter for ranks that neither measure nor end."""

    def take_samples(self, job_id: str, fence: int, rank: int, samples: object) -> None:
        raise AssertionError

    def count_exit(self, job_id: str, fence: int, rank: int, reason: str) -> None:
        raise AssertionError


def test_a_rank_is_silent_for_as_long_as_its_shim_has_listened_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now_s[0])
    watched = Attempt(AttemptDir(tmp_path, 7), "j1", FactBook(), Uncounted())
    for rank in (0, 1):
        watched.take({"type": "spawned", "rank": rank, "pid": 5, "starttime": 1, "boottime_ns": 1})
    now_s[0] = 103.0
    watched.take({"type": "worker", "rank": 1, "message": {"type": "beat", "step": 3}, "boottime_ns": 1})
    assert watched.silences() == [(0, 3.0), (1, 0.0)]
    now_s[0] = 120.0
    assert watched.silences() == [(0, 3.0), (1, 0.0)], "the shim itself says nothing: nobody knows"
    assert not watched.take({"type": "alive"})
    assert watched.silences() == [(0, 20.0), (1, 17.0)]
    watched.forget_ranks()
    assert watched.silences() == []
