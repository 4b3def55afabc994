"""Text files become rows of tokens; every step's rows depend on the seed and the step alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stagekit.errors import UserError
from stagekit.hf.text import documents, find_files, packed, padded


def test_documents_are_packed_one_after_the_other_and_only_the_last_row_is_padded() -> None:
    rows = packed([[1, 2, 3], [4, 5], [6, 7]], 3, pad=0)
    assert rows.tokens.tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert rows.valid.tolist() == [[True] * 3, [True] * 3, [True, False, False]]


def test_rows_that_overlap_by_one_predict_every_token_but_the_first_once() -> None:
    rows = packed([list(range(1, 8))], 4, pad=0, overlap=1)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    rows = packed([list(range(1, 9))], 4, pad=0, overlap=1)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 0, 0]]


def test_a_text_shorter_than_a_row_is_one_padded_row() -> None:
    assert packed([[5]], 3, pad=9).tokens.tolist() == [[5, 9, 9]]
    assert padded([[1, 2, 3, 4], []], 3, 0).valid.sum() == 3


def test_each_epoch_gives_every_row_once_in_another_order() -> None:
    rows = padded([[i] for i in range(7)], 1, 0)
    stream = np.concatenate([rows.order(step * 3, 3, seed=4) for step in range(7)])
    epochs = stream.reshape(3, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_any_step_can_be_drawn_by_itself() -> None:
    rows = padded([[i] for i in range(5)], 1, 0)
    stream = rows.order(0, 40, seed=1)
    assert rows.order(24, 8, seed=1).tolist() == stream[24:32].tolist()
    assert rows.order(0, 12, seed=1).tolist() == stream[:12].tolist(), "a batch may hold more rows than there are"


def test_a_folder_stands_for_its_text_files_and_a_relative_name_is_in_the_source(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "c.py"):
        (tmp_path / name).touch()
    assert find_files(str(tmp_path), None) == [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    assert find_files(["b.txt"], str(tmp_path)) == [tmp_path / "b.txt"]
    with pytest.raises(UserError, match=r"b\.txt is relative, but the job has no `source`"):
        find_files("b.txt", None)
    with pytest.raises(UserError, match=r"params\.data names no file"):
        find_files([], None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"the folder .*empty holds no \.txt or \.jsonl file on this node"):
        find_files("empty", str(tmp_path))


def test_lines_of_jsonl_are_documents_and_other_files_are_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + json.dumps({"text": "two\nlines"}))
    (tmp_path / "b.txt").write_text("three")
    assert list(documents(find_files(str(tmp_path), None), ["text"])) == [("one",), ("two\nlines",), ("three",)]


@pytest.mark.parametrize(
    ("name", "content", "fields", "told"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": 2}', ["text"], r"a\.jsonl:2 is no JSON object with text"),
        ("a.jsonl", b'{"text": null}', ["text"], r"a\.jsonl:1: text is None, not text"),
        ("a.jsonl", b"[1]", ["text"], r"a\.jsonl:1 is no JSON object"),
        ("a.txt", b"\xff\xfe", ["text"], r"a\.txt is not UTF-8 text \(byte 0\)"),
        ("a.txt", b"text", ["source", "target"], r"must be \.jsonl with source and target in each line"),
    ],
)
def test_a_file_that_can_not_be_used_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, fields: list[str], told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        list(documents([tmp_path / name], fields))
    with pytest.raises(UserError, match=r"can't read .*absent on this node"):
        list(documents([tmp_path / "absent"], fields))
