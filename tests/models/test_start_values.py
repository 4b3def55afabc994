"""Start values of real model classes: recorded, never rebuilt; equal to transformers' own builds and loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn

from stagekit.graph.capture.capture import capture
from stagekit.graph.values.build import RebuiltValues, RecordedValues, Start, build_for_real, named_tensors, open_model

WIDE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
IDS = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (lambda: transformers.GPT2Config(n_layer=2, n_embd=96, n_head=4, n_positions=64, **IDS), "CausalLM"),
    "llama": (lambda: transformers.LlamaConfig(**WIDE), "CausalLM"),
    "mistral": (lambda: transformers.MistralConfig(**WIDE, num_key_value_heads=2), "CausalLM"),
    "qwen2": (lambda: transformers.Qwen2Config(**WIDE, num_key_value_heads=2), "CausalLM"),
    "phi": (lambda: transformers.PhiConfig(**WIDE), "CausalLM"),
    "gpt-neox": (lambda: transformers.GPTNeoXConfig(**WIDE), "CausalLM"),
    "opt": (
        lambda: transformers.OPTConfig(
            hidden_size=96,
            ffn_dim=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=300,
            max_position_embeddings=64,
            word_embed_proj_dim=96,
        ),
        "CausalLM",
    ),
    "bert": (lambda: transformers.BertConfig(**WIDE), "MaskedLM"),
    "distilbert": (
        lambda: transformers.DistilBertConfig(dim=96, hidden_dim=192, n_layers=2, n_heads=4, vocab_size=300),
        "MaskedLM",
    ),
    "t5": (
        lambda: transformers.T5Config(d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4, vocab_size=300),
        "Seq2SeqLM",
    ),
    "vit": (
        lambda: transformers.ViTConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        ),
        "ImageClassification",
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**WIDE, num_key_value_heads=2, num_local_experts=4),
        "CausalLM",
    ),
}


def _auto(kind: str) -> Any:
    return getattr(transformers, f"AutoModelFor{kind}")


def _builders(name: str) -> dict[str, Callable[[], nn.Module]]:
    make, kind = CONFIGS[name]
    config = make()
    model_class = type(_auto(kind).from_config(config))
    return {"from_config": lambda: _auto(kind).from_config(config), "class": lambda: model_class(make())}


@pytest.mark.parametrize("name", CONFIGS)
def test_stream_equals_a_real_build_bit_for_bit_and_is_recorded(name: str) -> None:
    for way, build in _builders(name).items():
        module, source = open_model(build, seed=3)
        assert isinstance(source, RecordedValues), f"{way}: {source.note}"
        assert all(p.is_meta for p in module.parameters() if p.numel() > 4096)
        real = dict(named_tensors(build_for_real(build, seed=3)))
        values = source.take(list(real))
        assert [key for key, value in real.items() if not torch.equal(values[key], value)] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_a_saved_directory_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    build = _builders(name)["class"]
    torch.manual_seed(8)
    saved = build()
    saved.save_pretrained(tmp_path, max_shard_size="200KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module, source = open_model(build, 3, Start(weights=tmp_path))
    loaded = type(saved).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    values = source.take([key for key, _ in named_tensors(module)])
    assert [key for key, value in named_tensors(loaded) if not torch.equal(values[key], value)] == []


def test_from_pretrained_inside_a_constructor_keeps_the_saved_values(tmp_path: Path) -> None:
    make, _ = CONFIGS["llama"]
    torch.manual_seed(8)
    saved = transformers.LlamaForCausalLM(make())
    saved.save_pretrained(tmp_path)
    build = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path)  # noqa: E731
    _, source = open_model(build, seed=3)
    assert isinstance(source, RebuiltValues)
    assert "the whole model (1 MiB) is built in every worker, one of a node at a time" in source.note
    values = source.take(list(saved.state_dict()))
    assert [key for key, value in saved.state_dict().items() if not torch.equal(values[key], value)] == []


def test_the_plan_of_a_model_that_loads_itself_says_what_that_costs(tmp_path: Path) -> None:
    config = CONFIGS["llama"][0]()
    config.use_cache = False
    torch.manual_seed(8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    build = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path)  # noqa: E731
    cut = capture(build, (tokens,)).cut("parameters", 2, measured=False)
    assert "with `weights:` each stage would read its own values only" in cut.spec.start_values
    stage = cut.stage_module(1)
    loaded = dict(build().named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in stage.named_parameters())


ZOO = {case.name: case.build for case in (*zoo.listed(), *zoo.further(), *zoo.awkward())}


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_is_recorded_and_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagekit.graph.values.recorder.SMALL_NUMEL", 16)  # the zoo's models are small
    build = lambda: ZOO[name](0.1)  # noqa: E731
    _, source = open_model(build, seed=3)
    assert isinstance(source, RecordedValues), source.note
    real = dict(named_tensors(build_for_real(build, seed=3)))
    values = source.take(list(real))
    assert [k for k, v in real.items() if not torch.equal(values[k].nan_to_num(), v.nan_to_num())] == []
