"""Small transformers directories, made here: a byte-level tokenizer, a config, weights if asked for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from tests.models.hub import by_name

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "every",
    "dog",
    "that",
    "ran",
    "past",
    "its",
    "house",
    "in",
    "rain",
    "or",
    "sun",
]


def write_text(file: Path, *, words: int = 3000, seed: int = 0) -> Path:
    """Write random sentences of few words: something to learn."""
    draws = random.Random(seed)
    file.write_text(" ".join(draws.choice(WORDS) for _ in range(words)))
    return file


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer of WORDS."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate([*special, *dict.fromkeys(WORDS)])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


# Jobs on these sizes report a plain loop's losses bit for bit. On the table's the mean of two chunks' losses may round
# otherwise in its last bit (seen with one stage too, where the losses of later steps are equal again).
_LLAMA = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
_SIZES: dict[str, dict[str, int]] = {"llama": {**_LLAMA, "intermediate_size": 64, "vocab_size": 32}}


def config(kind: str, **changes: Any) -> Any:
    """Return a tiny config of `kind`, gpt2, llama, bert or t5, without dropout and for the tokenizer above."""
    model = by_name(kind)
    made = model.configuration(
        **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, **_SIZES.get(kind, {}), **changes}
    )
    made.architectures = [model.model]
    return made


def write_model(folder: Path, kind: str, *, weights_seed: int | None = None, **changes: Any) -> Path:
    """Write config and tokenizer of a tiny model, and weights drawn from `weights_seed` unless that is None."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    made = config(kind, **changes)
    if weights_seed is None:
        made.save_pretrained(folder)
    else:
        torch.manual_seed(weights_seed)
        getattr(transformers, made.architectures[0])._from_config(made).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
