"""Start values of real model classes: recorded, never rebuilt; equal to transformers' own builds and loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub
import pytest
import torch
import transformers
import zoo
from torch import nn

from stagekit.graph.capture.capture import capture
from stagekit.graph.values.build import RebuiltValues, RecordedValues, Start, build_for_real, named_tensors, open_model

NAMES = [model.name for model in hub.LISTED]
AUTO = {
    "LMHeadModel": "CausalLM",
    "ForCausalLM": "CausalLM",
    "ForMaskedLM": "MaskedLM",
    "ForConditionalGeneration": "Seq2SeqLM",
    "ForImageClassification": "ImageClassification",
}


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagekit.graph.values.recorder.SMALL_NUMEL", 16)  # the models are small


def _builders(name: str) -> dict[str, Callable[[], nn.Module]]:
    model = hub.by_name(name)
    kind = next(kind for end, kind in AUTO.items() if model.model.endswith(end))
    auto, config = getattr(transformers, f"AutoModelFor{kind}"), model.configuration(0.1)
    return {"from_config": lambda: auto.from_config(config), "class": lambda: model.build(0.1)}


@pytest.mark.parametrize("name", NAMES)
def test_stream_equals_a_real_build_bit_for_bit_and_is_recorded(name: str) -> None:
    for way, build in _builders(name).items():
        module, source = open_model(build, seed=3)
        assert isinstance(source, RecordedValues), f"{way}: {source.note}"
        assert all(p.is_meta for p in module.parameters() if p.numel() > 16)
        real = dict(named_tensors(build_for_real(build, seed=3)))
        values = source.take(list(real))
        assert [key for key, value in real.items() if not torch.equal(values[key], value)] == []


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_a_saved_directory_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    build = _builders(name)["class"]
    torch.manual_seed(8)
    saved = build()
    saved.save_pretrained(tmp_path, max_shard_size="30KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module, source = open_model(build, 3, Start(weights=tmp_path))
    loaded = type(saved).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    values = source.take([key for key, _ in named_tensors(module)])
    assert [key for key, value in named_tensors(loaded) if not torch.equal(values[key], value)] == []


def test_from_pretrained_inside_a_constructor_keeps_the_saved_values(tmp_path: Path) -> None:
    torch.manual_seed(8)
    saved: Any = hub.by_name("llama").build()
    saved.save_pretrained(tmp_path)
    build = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path)  # noqa: E731
    _, source = open_model(build, seed=3)
    assert isinstance(source, RebuiltValues)
    assert re.search(r"the whole model \(.* MiB\) is built in every worker, one of a node at a time", source.note)
    values = source.take(list(saved.state_dict()))
    assert [key for key, value in saved.state_dict().items() if not torch.equal(values[key], value)] == []


def test_the_plan_of_a_model_that_loads_itself_says_what_that_costs(tmp_path: Path) -> None:
    torch.manual_seed(8)
    saved: Any = hub.by_name("llama").build()
    saved.save_pretrained(tmp_path)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    build = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path)  # noqa: E731
    cut = capture(build, (tokens,)).cut("parameters", 2, measured=False)
    assert "with `weights:` each stage would read its own values only" in cut.spec.start_values
    stage = cut.stage_module(1)
    loaded = dict(build().named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in stage.named_parameters())


ZOO = {case.name: case.build for case in (*zoo.listed(), *zoo.further(), *zoo.awkward())}


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_is_recorded_and_equal(name: str) -> None:
    build = lambda: ZOO[name](0.1)  # noqa: E731
    _, source = open_model(build, seed=3)
    assert isinstance(source, RecordedValues), source.note
    real = dict(named_tensors(build_for_real(build, seed=3)))
    values = source.take(list(real))
    assert [k for k, v in real.items() if not torch.equal(values[k].nan_to_num(), v.nan_to_num())] == []
