"""Small configurations of the model classes that people bring from transformers, each with the inputs of one chunk.

The one table of them: tests.support.hub writes directories of four, test_start_values builds those that are listed.
Their own losses are inside (`labels`), so targets are a late keyword argument. `dropout` is the rate of every dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, ROWS, LENGTH = 96, 4, 12


@dataclass(frozen=True)
class HubModel:
    """`kind` says how it is fed; `sizes` and `rates` are fields of its configuration."""

    name: str
    config: str
    model: str
    kind: str
    sizes: dict[str, Any]
    rates: tuple[str, ...] = ()

    def configuration(self, dropout: float = 0.0, **changes: Any) -> Any:
        """Return a new configuration, which the model may change."""
        import transformers

        return getattr(transformers, self.config)(**{**self.sizes, **dict.fromkeys(self.rates, dropout), **changes})

    @property
    def model_class(self) -> Any:
        """The class in transformers."""
        import transformers

        return getattr(transformers, self.model)

    def build(self, dropout: float = 0.0) -> nn.Module:
        """Return the model in training mode."""
        model: nn.Module = self.model_class(self.configuration(dropout))
        return model.train()

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of one chunk."""
        return _INPUTS[self.kind]()


def _tokens(seed: int, limit: int = VOCABULARY, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(3, limit, (rows, length), generator=torch.Generator().manual_seed(seed))


def _mask() -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, 9:] = 0
    mask[3, 5:] = 0
    return mask


def _image(size: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=torch.Generator().manual_seed(3))


_INPUTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "causal": lambda: {"input_ids": _tokens(1), "labels": _tokens(2)},
    "padded": lambda: {"input_ids": _tokens(1), "attention_mask": _mask(), "labels": _tokens(2)},
    "plain": lambda: {"input_ids": _tokens(1), "attention_mask": _mask()},
    "seq2seq": lambda: {
        "input_ids": _tokens(1),
        "decoder_input_ids": _tokens(2)[:, :7].contiguous(),
        "labels": _tokens(4)[:, :7].contiguous(),
    },
    "image": lambda: {"pixel_values": _image(), "labels": torch.arange(ROWS) % 3},
    "contrastive": lambda: {"input_ids": _tokens(1), "pixel_values": _image(), "return_loss": True},  # type: ignore[dict-item]
    "speech": lambda: {
        "input_features": torch.randn(ROWS, 16, 40, generator=torch.Generator().manual_seed(5)),
        "decoder_input_ids": _tokens(2)[:, :7].contiguous(),
    },
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_BERT_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")

LISTED = (
    HubModel(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        "padded",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "use_cache": False},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    HubModel("llama", "LlamaConfig", "LlamaForCausalLM", "padded", _LLAMA, ("attention_dropout",)),
    HubModel(
        "mistral",
        "MistralConfig",
        "MistralForCausalLM",
        "causal",
        {**_LLAMA, "sliding_window": 6},
        ("attention_dropout",),
    ),
    HubModel("qwen2", "Qwen2Config", "Qwen2ForCausalLM", "padded", _LLAMA, ("attention_dropout",)),
    HubModel(
        "phi",
        "PhiConfig",
        "PhiForCausalLM",
        "causal",
        {**_LLAMA, "num_key_value_heads": 4},
        ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    HubModel(
        "gpt-neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        "padded",
        {**_BERT, "use_cache": False},
        ("attention_dropout", "hidden_dropout"),
    ),
    HubModel(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        "padded",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
            "use_cache": False,
        },
        ("dropout", "attention_dropout"),
    ),
    HubModel("bert", "BertConfig", "BertForMaskedLM", "padded", _BERT, _BERT_RATES),
    HubModel(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "padded",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 4,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
        ("dropout", "attention_dropout"),
    ),
    HubModel(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        "seq2seq",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        ("dropout_rate",),
    ),
    HubModel(
        "vit",
        "ViTConfig",
        "ViTForImageClassification",
        "image",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 3,
        },
        _BERT_RATES,
    ),
    HubModel(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        "padded",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        ("attention_dropout",),
    ),
)

FURTHER = (
    HubModel(
        "llama with tied weights", "LlamaConfig", "LlamaForCausalLM", "causal", {**_LLAMA, "tie_word_embeddings": True}
    ),
    HubModel("qwen3", "Qwen3Config", "Qwen3ForCausalLM", "padded", {**_LLAMA, "head_dim": 8}, ("attention_dropout",)),
    HubModel("gemma", "GemmaConfig", "GemmaForCausalLM", "padded", {**_LLAMA, "head_dim": 8}, ("attention_dropout",)),
    HubModel(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "padded",
        {**_LLAMA, "head_dim": 8, "sliding_window": 6},
        ("attention_dropout",),
    ),
    HubModel("phi3", "Phi3Config", "Phi3ForCausalLM", "padded", _LLAMA, ("resid_pdrop", "attention_dropout")),
    HubModel("olmo", "OlmoConfig", "OlmoForCausalLM", "padded", _LLAMA, ("attention_dropout",)),
    HubModel(
        "stablelm", "StableLmConfig", "StableLmForCausalLM", "padded", _LLAMA, ("hidden_dropout", "attention_dropout")
    ),
    HubModel(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        "padded",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "use_cache": False,
        },
        ("hidden_dropout", "attention_dropout"),
    ),
    HubModel(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        "padded",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False},
        ("hidden_dropout", "attention_dropout"),
    ),
    HubModel(
        "gpt-neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        "padded",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "use_cache": False,
        },
        ("resid_dropout", "embed_dropout", "attention_dropout"),
    ),
    HubModel(
        "gptj",
        "GPTJConfig",
        "GPTJForCausalLM",
        "padded",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "rotary_dim": 4,
            "n_positions": 32,
            "use_cache": False,
        },
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    HubModel(
        "qwen2-moe",
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        "padded",
        {
            **_LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "output_router_logits": True,
        },
        ("attention_dropout",),
    ),
    HubModel("roberta", "RobertaConfig", "RobertaForMaskedLM", "padded", _BERT, _BERT_RATES),
    HubModel(
        "albert",
        "AlbertConfig",
        "AlbertForMaskedLM",
        "padded",
        {**_BERT, "embedding_size": 16},
        _BERT_RATES,
    ),
    HubModel("electra", "ElectraConfig", "ElectraForMaskedLM", "padded", {**_BERT, "embedding_size": 16}, _BERT_RATES),
    HubModel("deberta-v2", "DebertaV2Config", "DebertaV2ForMaskedLM", "padded", _BERT, _BERT_RATES),
    HubModel(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        "padded",
        {
            **_BERT,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 6,
        },
        ("attention_dropout", "embedding_dropout", "mlp_dropout"),
    ),
    HubModel(
        "bart",
        "BartConfig",
        "BartForConditionalGeneration",
        "seq2seq",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 32,
            "use_cache": False,
        },
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    HubModel(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "speech",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    HubModel(
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        "causal",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3, "use_cache": False},
    ),
    HubModel(
        "convnext",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "image",
        {"hidden_sizes": [16, 24], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3},
    ),
    HubModel(
        "resnet of transformers",
        "ResNetConfig",
        "ResNetForImageClassification",
        "image",
        {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 2], "num_labels": 3, "layer_type": "basic"},
    ),
    HubModel(
        "swin",
        "SwinConfig",
        "SwinForImageClassification",
        "image",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
            "drop_path_rate": 0.0,
        },
        _BERT_RATES,
    ),
)


@functools.cache
def by_name(name: str) -> HubModel:
    """Return the model called `name`."""
    return next(model for model in (*LISTED, *FURTHER) if model.name == name)
