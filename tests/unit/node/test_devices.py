from __future__ import annotations

from pathlib import Path

import pytest

from piped.node.devices import find_slots
from piped.node.model import Slot


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-aaaa\necho GPU-bbbb\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")


@pytest.mark.usefixtures("two_gpus")
def test_a_machine_with_cuda_offers_one_slot_per_device() -> None:
    assert find_slots(None) == (Slot(0, "cuda:0", "GPU-aaaa"), Slot(1, "cuda:1", "GPU-bbbb"))
    assert find_slots(1) == (Slot(0, "cuda:0", "GPU-aaaa"),)


@pytest.mark.usefixtures("two_gpus")
def test_more_slots_than_devices_are_slots_without_one() -> None:
    assert [slot.device for slot in find_slots(3)] == ["cpu:0", "cpu:1", "cpu:2"]


def test_a_tool_that_fails_offers_slots_without_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert len(find_slots(64)) == 64  # more than any machine's devices
    assert find_slots(64)[63] == Slot(63, "cpu:63")
