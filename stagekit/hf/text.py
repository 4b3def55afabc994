"""Text files as rows of tokens: which documents there are, how they are cut into rows, in which order rows come.

Decides the content of every batch from (files, tokenizer, seed, step) alone, so that a job resumes at any step and
replicas share one batch. Masks and losses are stagekit.hf.program's, which alone calls this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagekit.errors import UserError

IGNORED = -100  # a target that counts in no loss, as torch's cross_entropy has it


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of `width` tokens each: `tokens` and `valid`, both [rows, width]."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    valid: np.ndarray[Any, np.dtype[np.bool_]]

    def order(self, first: int, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of `count` rows from the endless stream that shuffles all rows anew in each epoch."""
        num_rows = len(self.tokens)
        chosen = []
        while count > 0:
            epoch, position = divmod(first, num_rows)
            part = np.random.default_rng((seed, epoch)).permutation(num_rows)[position : position + count]
            chosen.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(chosen)


def find_files(names: str | Sequence[str], source_dir: str | None) -> list[Path]:
    """Return the files that `names` say: absolute, or inside the job's `source`; a folder stands for what is in it."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
        raise UserError("params.data names no file; write e.g. data: [/data/books.txt]")
    files: list[Path] = []
    for name in given:
        path = Path(name)
        if not path.is_absolute():
            if source_dir is None:
                raise UserError(f"params.data: {name} is relative, but the job has no `source`; write an absolute path")
            path = Path(source_dir) / path
        found = sorted(f for f in path.iterdir() if f.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        if not found:
            raise UserError(f"params.data: the folder {path} holds no .txt or .jsonl file on this node")
        files += found
    return files


def documents(files: Sequence[Path], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the documents of `files`: a .jsonl file's lines with these `fields`, any other file as one text.

    Raises UserError for a file that can't be read, naming the line.
    """
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"params.data: can't read {file} on this node: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"params.data: {file} is not UTF-8 text (byte {error.start})") from error
        if file.suffix == ".jsonl":
            yield from _lines(file, text, fields)
        elif len(fields) > 1:
            raise UserError(f"params.data: {file} must be .jsonl with {' and '.join(fields)} in each line")
        else:
            yield (text,)


def _lines(file: Path, text: str, fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts = tuple(record[field] for field in fields)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"params.data: {file}:{number} is no JSON object with {' and '.join(fields)}") from None
        wrong = next((field for field, text in zip(fields, texts, strict=True) if not isinstance(text, str)), None)
        if wrong is not None:
            raise UserError(f"params.data: {file}:{number}: {wrong} is {record[wrong]!r}, not text")
        yield texts


def packed(streams: Sequence[Sequence[int]], width: int, pad: int, *, overlap: int = 0) -> Rows:
    """Return rows cut out of all documents in a row; only the last one is padded, and rows share `overlap` tokens."""
    stream = np.concatenate([np.asarray(tokens, np.int64) for tokens in streams]) if streams else np.zeros(0, np.int64)
    step = width - overlap
    return padded([stream[i : i + width] for i in range(0, max(1, len(stream) - overlap), step)], width, pad)


def padded(rows: Sequence[Any], width: int, pad: int) -> Rows:
    """Return one row per sequence, cut at `width` and padded to it."""
    tokens = np.full((len(rows), width), pad, np.int64)
    valid = np.zeros((len(rows), width), np.bool_)
    for i, row in enumerate(rows):
        used = min(len(row), width)
        tokens[i, :used] = row[:used]
        valid[i, :used] = True
    return Rows(tokens, valid)
