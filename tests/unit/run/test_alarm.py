"""The first error of a step reaches a rank however long nothing went wrong before."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from stagekit.errors import RemoteError, StageError
from stagekit.run import alarm
from tests.support.cluster import wait_until


def test_an_error_is_heard_after_more_quiet_than_a_store_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "_WAIT", timedelta(milliseconds=30))
    quiet, came = threading.Event(), alarm._came

    def noted(store: Any, key: str) -> bool:
        if not (is_there := came(store, key)):
            quiet.set()
        return is_there

    monkeypatch.setattr(alarm, "_came", noted)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    here, there = alarm.Alarm(store, "pipeline", 0, 2), alarm.Alarm(store, "pipeline", 1, 2)
    assert quiet.wait(20)
    there.report(StageError("stage 1 is broken", rank=1, stage=1, chunk=0, op="F"))
    wait_until(lambda: here.rang, 20, "the alarm")
    failure = here.failure()
    assert isinstance(failure, RemoteError) and "stage 1 is broken" in str(failure)
    here.close()
    there.close()
