"""The coordinator's rules for a spec and those of the job file are the same rules."""

from __future__ import annotations

import pytest

from pipeapi import jobspec
from piped.core import specs
from piped.errors import SpecError
from tests.unit.core.build import spec

NAMES = ["gpt", "a", "a.b-c", "a" * 63, "a" * 64, "A", "a_b", "-a", "a-", "", "a b", "é"]
ENV = ["A", "A_1", "_A", "a", "1A", "A-B", "", "LD_X", "PYTHONPATH", "GRPC_X", "PIPED_X", "MASTER_ADDR", "BASH_FUNC_x"]
ENV += ["RANK", "RANKS", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_X", "OMP_NUM_THREADS"]


def is_good(**changes):
    try:
        specs.check(spec(**changes))
    except SpecError:
        return False
    return True


def text(name="gpt"):
    return f"version: 1\nname: {name!r}\nprogram: a.b:C\npipeline: {{stages: 2}}\ntrain: {{steps: 1}}\n".encode()


@pytest.mark.parametrize("name", NAMES)
def test_both_take_the_same_job_names(name):
    try:
        jobspec.load_text(text(name), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(name=name)
    else:
        assert is_good(name=name)


@pytest.mark.parametrize("value", ["", "x" * 131_000, "x" * 131_065, "x" * 131_066, "x\0"])
@pytest.mark.parametrize("name", ENV)
def test_both_take_the_same_environment(name, value):
    try:
        jobspec.check_env(name, value)
    except ValueError:
        assert not is_good(env=((name, value),))
    else:
        assert is_good(env=((name, value),))


@pytest.mark.parametrize("seconds", [0, 1, 600, 86_400, 86_401])
def test_both_take_the_same_start_timeouts(seconds):
    try:
        jobspec.load_text(text() + f"recovery: {{start_timeout: {seconds}}}\n".encode(), "job.yaml")
    except jobspec.SpecError:
        assert not is_good(start_timeout_s=seconds)
    else:
        assert is_good(start_timeout_s=seconds)


def test_both_know_the_same_schedules():
    assert specs.SCHEDULES == jobspec.SCHEDULES
