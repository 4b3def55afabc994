"""`program: hf:FOLDER`: a transformers model directory as a program, without a class.

The folder's config.json names the architecture, its tokenizer cuts `params.data` into tokens, its safetensors are the
start weights; without them the model starts as `init` says. Trains language models: causal, masked, and sequence to
sequence. Decides the inputs and the loss of each; what the folder holds is stagekit.hf.folder's, rows come from
stagekit.hf.text. stagekit.load makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.errors import UserError
from stagekit.hf.folder import TASKS, architecture, holds_weights, read_config, read_tokenizer, task_of, task_of_name
from stagekit.hf.text import IGNORED, Rows, documents, find_files, packed, padded
from stagekit.program import Batch, ProgramDefaults
from stagekit.rows import chunk_rows, share_of

SCHEDULES = ("constant", "linear", "cosine")
_MASKED = 0.15  # of the tokens are predicted; 80 % of them masked, 10 % replaced, 10 % kept: BERT, Devlin et al. 2018


class Program(ProgramDefaults):
    """Trains the language model in `folder` on text files.

    `data`: .txt files (one document each), .jsonl files (`text` per line; for seq2seq `source` and `target`), folders of
    them. `sequence`: tokens per row. `batch`: rows of a step, over all replicas. `pack`: rows cut out of all documents in
    a row; otherwise each document starts a row and is padded. `lr_schedule`: after `warmup_steps`, "constant", or
    "linear" or "cosine" down to zero at `decay_steps`.
    """

    def __init__(
        self,
        *,
        folder: str,
        source_dir: str | None = None,
        data: str | list[str],
        task: str = "auto",
        sequence: int = 512,
        batch: int = 8,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        lr_schedule: str = "constant",
        decay_steps: int = 0,
        dtype: str = "float32",
        pack: bool = True,
        seed: int = 0,
    ) -> None:
        _check_kinds(
            sequence=sequence,
            batch=batch,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            pack=pack,
            seed=seed,
        )
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.task = task_of(self.config, self.folder, task)
        self.sequence, self.batch, self.pack, self.seed = sequence, batch, pack, seed
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.lr_schedule, self.decay_steps = warmup_steps, lr_schedule, decay_steps
        self.files = find_files(data, source_dir)
        self.dtype = getattr(torch, str(dtype), None)
        self._check(dtype)

    def _check(self, dtype: str) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise UserError(f"params.dtype is {dtype!r}; use float32 or bfloat16")
        limit = getattr(self.config, "max_position_embeddings", None)
        if isinstance(limit, int) and self.sequence > limit:
            raise UserError(f"params.sequence is {self.sequence}, but the model in {self.folder} takes at most {limit}")
        if self.lr_schedule not in SCHEDULES:
            raise UserError(f"params.lr_schedule is {self.lr_schedule!r}; use one of {', '.join(SCHEDULES)}")
        if self.lr_schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise UserError(
                f"params.decay_steps is {self.decay_steps}: {self.lr_schedule} needs the step at which the rate is zero, "
                f"after warmup_steps ({self.warmup_steps}); e.g. train.steps"
            )
        if len(self.tokenizer) > self.config.vocab_size:
            raise UserError(
                f"the tokenizer in {self.folder} has {len(self.tokenizer)} tokens, the model {self.config.vocab_size}"
            )
        if self.task == "masked" and self.tokenizer.mask_token_id is None:
            raise UserError(f"the tokenizer in {self.folder} has no mask token, which a masked model is trained with")

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer."""
        return read_tokenizer(self.folder)

    @property
    def weights(self) -> Path | None:
        """The folder, if it holds weights."""
        return self.folder if holds_weights(self.folder) else None

    @property
    def warnings(self) -> list[str]:
        """What a plan without `weights` tells: training from random weights is rarely meant."""
        return [] if self.weights else [f"no weights (*.safetensors) in {self.folder}: the model starts at random"]

    def build_model(self) -> nn.Module:
        """Return the model from its config, in train mode."""
        import transformers

        name = architecture(self.config)
        is_of_task = task_of_name(name, bool(self.config.is_encoder_decoder)) == self.task
        model_class = getattr(transformers, name, None) if is_of_task else None
        if model_class is not None:
            model: nn.Module = model_class._from_config(self.config, dtype=self.dtype)
        else:
            model = getattr(transformers, TASKS[self.task]).from_config(self.config, dtype=self.dtype)
        return model.train()

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the keyword arguments of one chunk."""
        shape = (chunk_rows(self.batch, self.chunks, self.replicas), self.sequence)
        tokens = torch.zeros(shape, dtype=torch.int64)
        names = {"causal": (), "masked": ("attention_mask",), "seq2seq": ("attention_mask", "decoder_input_ids")}
        return (), {"input_ids": tokens, **{name: torch.ones_like(tokens) for name in names[self.task]}}

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean cross entropy per token that counts, in nats; 0 for a chunk without any."""
        logits = output.logits.flatten(0, -2).float()
        total = F.cross_entropy(logits, target.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / (target != IGNORED).sum().clamp(min=1)

    def loss_weight(self, target: Tensor) -> float:
        """Return the tokens that count: the loss of a step is their mean, however they are spread over chunks."""
        return float((target != IGNORED).sum())

    def tokens(self, target: Any) -> int:
        """Return the tokens that count."""
        return int(self.loss_weight(target))

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return AdamW; matrices decay, biases and norms don't."""
        parameters = [parameter for _, parameter in named_parameters]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.learning_rate)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the schedule of learning rates."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)

    def _rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.lr_schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return 1.0 - done if self.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    # ---- data

    def check_data(self) -> None:
        """Raise UserError unless `params.data` gives a batch; a plan asks before anything starts."""
        next(self.batches(0, 0, self.replicas))

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield this replica's rows of every step from `start_step`."""
        mine = share_of(self.batch, replica, replicas)
        sides = self._rows()
        step = start_step
        while True:
            chosen = sides[0].order(step * self.batch, self.batch, self.seed)
            draws = np.random.default_rng((self.seed, step, 1))
            yield self._batch([Rows(rows.tokens[chosen], rows.valid[chosen]) for rows in sides], draws, mine)
            step += 1

    def _rows(self) -> list[Rows]:
        tokenizer: Any = self.tokenizer
        pad = tokenizer.pad_token_id
        pad = pad if pad is not None else tokenizer.eos_token_id or 0
        fields = ("source", "target") if self.task == "seq2seq" else ("text",)
        texts = list(documents(self.files, fields))
        if not any("".join(text).strip() for text in texts):
            raise UserError(f"params.data: no text in {', '.join(map(str, self.files))}")
        ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, verbose=False)["input_ids"])

        if self.task == "seq2seq":
            return [padded([encode(text[side]) for text in texts], self.sequence, pad) for side in (0, 1)]
        streams = [encode(text) for (text,) in texts]
        if self.task == "causal":
            streams = [s if s[-1:] == ends else [*s, *ends] for s in streams]
        width = self.sequence + (self.task == "causal")
        if self.pack:
            return [packed(streams, width, pad, overlap=width - self.sequence)]
        step = self.sequence
        starts = [(s, i) for s in streams for i in range(0, max(1, len(s) - 1), step)]
        least = 2 if self.task == "causal" else 1  # a row with nothing to predict trains nothing
        rows = [s[i : i + width] for s, i in starts if len(s) - i >= least]
        if not rows:
            raise UserError(f"params.data: no document in {', '.join(map(str, self.files))} has a token to predict")
        return [padded(rows, width, pad)]

    def _batch(self, sides: Sequence[Rows], draws: np.random.Generator, mine: slice) -> Batch:
        rows = sides[0]
        target = np.where(rows.valid, rows.tokens, IGNORED)
        if self.task == "causal":
            kwargs, target = {"input_ids": rows.tokens[:, :-1]}, target[:, 1:]
        elif self.task == "masked":
            inputs, target = self._mask(rows, target, draws)
            kwargs = {"input_ids": inputs, "attention_mask": rows.valid.astype(np.int64)}
        else:
            target = np.where(sides[1].valid, sides[1].tokens, IGNORED)
            kwargs = {
                "input_ids": rows.tokens,
                "attention_mask": rows.valid.astype(np.int64),
                "decoder_input_ids": self._shifted(sides[1].tokens),
            }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value[mine])) for name, value in kwargs.items()}
        return Batch((), tensors, torch.from_numpy(np.ascontiguousarray(target[mine])))

    def _mask(self, rows: Rows, target: Any, draws: np.random.Generator) -> tuple[Any, Any]:
        special = np.isin(rows.tokens, self.tokenizer.all_special_ids)
        chosen = (draws.random(rows.tokens.shape) < _MASKED) & rows.valid & ~special
        how = draws.random(rows.tokens.shape)
        others = draws.integers(0, len(self.tokenizer), rows.tokens.shape)
        inputs = np.where(chosen & (how < 0.8), self.tokenizer.mask_token_id, rows.tokens)
        inputs = np.where(chosen & (how >= 0.8) & (how < 0.9), others, inputs)
        return inputs, np.where(chosen, target, IGNORED)

    def _shifted(self, tokens: Any) -> Any:
        start = getattr(self.config, "decoder_start_token_id", None)
        if start is None:
            start = self.config.pad_token_id  # what T5 and its relatives start with
        if start is None:
            raise UserError(
                f"{self.folder}/config.json has no decoder_start_token_id; add the token decoding starts with"
            )
        return np.concatenate([np.full((len(tokens), 1), start, np.int64), tokens[:, :-1]], axis=1)


_REAL = (int, float)
_KINDS: dict[str, tuple[tuple[type, ...], float, str]] = {  # parameter → kinds, least value, words
    "sequence": ((int,), 2, "tokens of a row, a whole number of at least 2"),
    "batch": ((int,), 1, "rows of a step, a whole number of at least 1"),
    "learning_rate": (_REAL, 0, "a number of at least 0"),
    "weight_decay": (_REAL, 0, "a number of at least 0"),
    "warmup_steps": ((int,), 0, "steps, a whole number of at least 0"),
    "decay_steps": ((int,), 0, "a step, a whole number of at least 0"),
    "seed": ((int,), 0, "a whole number of at least 0"),
}


def _check_kinds(*, pack: object, **values: Any) -> None:
    for name, value in values.items():
        kinds, least, words = _KINDS[name]
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not least <= float(value) < math.inf:
            hint = "; YAML reads 2e-5 as text, write 2.0e-5" if isinstance(value, str) and "e" in value else ""
            raise UserError(f"params.{name} is {value!r}; give {words}{hint}")
    if not isinstance(pack, bool):
        raise UserError(f"params.pack is {pack!r}; give true or false")
