"""A machine without a C++ compiler runs eagerly and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, warnings, stagekit
from torch import nn
pipe = stagekit.pipeline(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), args=(torch.randn(2, 4),),
    loss_fn=lambda o, t: ((o - t) ** 2).mean(), stages=1, chunks=2, split="parameters", compile="{compile}")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    run = pipe.deploy()
print(run.compiled, *(str(w.message) for w in seen))
run.step(torch.randn(4, 4), target=torch.randn(4, 4)).loss
"""


@pytest.mark.parametrize("compile", ["inductor", "auto"])
def test_without_a_compiler_stages_run_eagerly_and_say_so(compile: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    env |= {"PATH": str(tmp_path), "CXX": str(tmp_path / "no-compiler"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(compile=compile)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "{0: 'eager'}" in done.stdout
    assert "no C++ compiler was found here; install g++" in done.stdout
