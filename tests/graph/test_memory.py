"""A worker never holds the whole model: building one stage costs that stage and one tensor."""

from __future__ import annotations

import subprocess
import sys

MODEL_MIB = 16 * 16
_PROGRAM = """
from pathlib import Path
import torch
from torch import nn
from stagekit.graph.capture.capture import capture

def build():
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))

def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

def settled_mib():
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what is resident now
    return peak_mib()

first = peak_mib()
cut = capture(build, (torch.zeros(2, 2048),), check=False).cut(["4", "8", "12"], 4)
before = settled_mib()
stage = cut.stage_module(2)
held = sum(p.numel() * 4 for p in stage.parameters()) / 2**20
print(held, peak_mib() - before)
"""


def test_building_a_stage_costs_the_stage_and_one_tensor() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    held, grown = map(float, run.stdout.split())
    assert held == MODEL_MIB / 4
    assert grown < held + 16 + 24, "the stage, one tensor, and slack for the allocator"
