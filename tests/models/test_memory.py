"""How much memory and time it takes to plan a large model and to hold one stage of it. Prints what it measured.

Each measurement is a process of its own, since the high-water mark of a process never falls; it is VmHWM, since
`ru_maxrss` starts at what the parent held when it forked. Times are those of the process on its cores, so that other
work on the machine does not count.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BASE_SLACK = 48 << 20  # allocator and interpreter; a small model's stage is not large beside it

_COMMON = """
import json, resource, sys
from pathlib import Path
import torch
from stagekit.api import capture_model, plan_pipeline
torch.set_num_threads(1)

def llama(width, layers, vocabulary):
    def build():
        import transformers
        config = transformers.LlamaConfig(
            hidden_size=width, intermediate_size=width * 27 // 10, num_hidden_layers=layers, vocab_size=vocabulary,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)
    return build

def gpt(width, layers, vocabulary):
    from stagekit.examples.gpt import Program
    return Program(width=width, layers=layers, heads=width // 64, sequence=128).build_model

def plan(build, sequence, check=False, **start):
    inputs = torch.zeros(1, sequence, dtype=torch.int64)
    captured = capture_model(build, (inputs,), check=check, **start)
    return plan_pipeline(
        captured, loss_fn=lambda output, target: getattr(output, "logits", output).mean(), stages=4, chunks=4, measured=check,
        split="balanced" if check else "parameters",
    )

def tell(**facts):
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    print(json.dumps({"peak": peak, "cpu_s": used.ru_utime + used.ru_stime, **facts}))
"""

_PLAN = """
pipe = plan({kind}({width}, {layers}, {vocabulary}), 128, {check})
tell(parameters=sum(p.numel() for p in pipe.cut.captured.tensors.values()), check=pipe.plan.model.self_check)
"""

_STAGE = """
small = plan({kind}(64, 4, 100), 16)
small.stages[2].module
if {width}:
    pipe = plan({kind}({width}, {layers}, {vocabulary}), 16, init={init!r}, weights={weights!r})
    stage = pipe.stages[2].module
    tell(stage=sum(p.numel() * p.element_size() for p in stage.parameters()))
else:
    tell(stage=0)
"""

_SAVE = """
from safetensors.torch import save_file
save_file({kind}({width}, {layers}, {vocabulary})().state_dict(), {path!r})
"""


def _run(program: str, **values: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _COMMON + program.format(**values)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    return facts


def _plan(size: tuple[str, int, int, int], *, check: bool) -> dict[str, Any]:
    facts = _run(_PLAN, check=check, **_named(size))
    print(
        f"{facts['parameters'] / 1e9:.2f} B parameters planned in {facts['cpu_s']:.1f} s of a core, peak "
        f"{facts['peak'] / 2**30:.2f} GiB, self-check {facts['check']}"
    )
    return facts


def _named(size: tuple[str, int, int, int]) -> dict[str, Any]:
    return dict(zip(("kind", "width", "layers", "vocabulary"), size, strict=True))


@functools.cache
def _base(kind: str) -> int:
    """Return the peak of a process that imports the same and holds a stage of a tiny model."""
    return int(_run(_STAGE, kind=kind, width=0, layers=0, vocabulary=0, init="", weights=None)["peak"])


def _hold_a_stage(size: tuple[str, int, int, int], init: str, weights: str | None) -> None:
    facts = _run(_STAGE, init=init, weights=weights, **_named(size))
    base = _base(size[0])
    grown = facts["peak"] - base
    print(
        f"{init or 'weights'}: base {base / 2**20:.0f} MiB, stage {facts['stage'] / 2**20:.0f} MiB, peak above the "
        f"base {grown / 2**20:.0f} MiB = {grown / facts['stage']:.2f} stages"
    )
    assert grown <= 1.3 * facts["stage"] + BASE_SLACK


def _save(folder: Path, size: tuple[str, int, int, int]) -> str:
    path = str(folder / "model.safetensors")
    _run(_SAVE, path=path, **_named(size))
    return path


SMALL = ("gpt", 768, 12, 0)  # 85 M parameters
LARGE = ("llama", 1280, 18, 16000)  # 416 M
HUGE = ("llama", 2560, 24, 32000)  # 2.07 B


def test_a_model_is_planned_without_its_weights() -> None:
    facts = _plan(("gpt", 2048, 6, 0), check=False)
    assert facts["parameters"] > 2.5e8
    assert facts["peak"] < 0.75 * (1 << 30), "less than its weights"


@pytest.mark.parametrize("init", ["stream", "per_op"])
def test_a_worker_peaks_at_its_own_stage(init: str) -> None:
    _hold_a_stage(SMALL, init, None)


def test_a_worker_that_reads_weights_peaks_at_its_own_stage(tmp_path: Path) -> None:
    _hold_a_stage(SMALL, "", _save(tmp_path, SMALL))


@pytest.mark.soak
def test_two_billion_parameters_are_planned_within_a_minute_and_2_gib() -> None:
    facts = _plan(HUGE, check=True)
    assert facts["parameters"] > 2e9
    assert facts["check"] == "structural"
    assert facts["peak"] < 2 << 30
    assert facts["cpu_s"] < 60


@pytest.mark.soak
@pytest.mark.parametrize("init", ["stream", "per_op"])
def test_a_worker_of_400_million_parameters_peaks_at_its_own_stage(init: str) -> None:
    _hold_a_stage(LARGE, init, None)


@pytest.mark.soak
def test_a_worker_that_reads_1_6_gib_of_weights_peaks_at_its_own_stage(tmp_path: Path) -> None:
    _hold_a_stage(LARGE, "", _save(tmp_path, LARGE))
