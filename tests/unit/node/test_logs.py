"""Reading by offset what the shim's LogFile writes, over rotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from piped.node.logs import NoRecord, Piece, Record, read
from piped.shim.logfile import LogFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "7" / "ranks" / "0"
    made.mkdir(parents=True)
    return made


def ask(folder: Path, record: Record = Record.LOG, *, offset: int = 0, tail: int = 0, most: int = 1000) -> Piece:
    attempts = folder.parent.parent.parent
    return read(attempts, 7, 0, record, offset=offset, tail_bytes=tail, max_bytes=most)


def test_every_offset_of_a_rotated_log_gives_the_bytes_that_were_written_there(folder: Path) -> None:
    log, written = LogFile(folder, limit_bytes=200), b""
    for number in range(60):
        line = f"line {number} {'x' * (number % 7)}\n".encode()
        log.write(line)
        written += line
        first = ask(folder)
        dropped = first.next_offset if first.data.startswith("… dropped".encode()) else 0
        for offset in range(dropped, len(written), 9):
            piece = ask(folder, offset=offset, most=50)
            assert piece.data == written[offset : offset + len(piece.data)]
            assert piece.data and piece.next_offset == offset + len(piece.data)
    log.close()
    assert dropped > 0
    assert ask(folder).data == f"… dropped {dropped} bytes\n".encode()
    assert ask(folder, tail=5).data == written[-5:]


def test_the_end_is_said_when_the_rank_is_over_and_everything_is_read(folder: Path) -> None:
    log = LogFile(folder)
    log.write(b"hello\n")
    assert ask(folder) == Piece(b"hello\n", 6, False)
    (folder / "exit.json").write_text("{}")
    assert ask(folder, most=3) == Piece(b"hel", 3, False)
    assert ask(folder, offset=3) == Piece(b"lo\n", 6, True)
    assert ask(folder, offset=6) == Piece(b"", 6, True)
    assert ask(folder, offset=99).is_last
    assert ask(folder, Record.TRACE) == Piece(b"", 0, True)
    log.close()


def test_records_are_read_as_they_are(folder: Path) -> None:
    (folder / "steps.jsonl").write_text('{"step": 1}\n')
    assert ask(folder, Record.STEPS, offset=2).data == b'step": 1}\n'
    assert ask(folder, Record.STEPS, tail=3).data == b"1}\n"


def test_an_attempt_that_is_not_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoRecord, match="attempt 7 is not on this node"):
        read(tmp_path, 7, 0, Record.LOG, offset=0, tail_bytes=0, max_bytes=9)
