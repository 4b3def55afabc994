"""The packed source holds what the local check imports; what can't be packed is refused by name."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest

from pipectl import jobfile
from pipectl.errors import CommandError, Exit


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "lib" / "model.py").write_text("x = 1\n")
    return source


def packed(folder):
    with tarfile.open(fileobj=io.BytesIO(jobfile.pack(folder))) as tar:
        return {each.name: tar.extractfile(each).read().decode() for each in tar if each.isfile()}


def refusal(folder):
    with pytest.raises(CommandError) as refused:
        jobfile.pack(folder)
    assert refused.value.exit_code == Exit.USAGE
    return refused.value.message


def test_links_that_stay_inside_are_packed_as_what_they_lead_to(folder):
    (folder / "program.py").symlink_to("lib/model.py")
    (folder / "package").symlink_to(folder / "lib", target_is_directory=True)
    assert packed(folder) == dict.fromkeys(("lib/model.py", "package/model.py", "program.py"), "x = 1\n")


def test_a_folder_that_is_named_by_a_link_is_packed(folder, tmp_path):
    (tmp_path / "named").symlink_to(folder)
    (folder / "program.py").symlink_to(folder / "lib" / "model.py")
    assert packed(tmp_path / "named") == packed(folder)


def test_links_that_lead_out_or_nowhere_or_round_are_refused_by_name(folder, tmp_path):
    (tmp_path / "outside.py").write_text("secret\n")
    for target, told in {
        "../../outside.py": f"leads out of it, to {tmp_path / 'outside.py'}",
        "nothing.py": "leads nowhere",
        "link.py": "leads nowhere",
        "..": "leads to a folder that holds the link itself",
    }.items():
        (folder / "lib" / "link.py").symlink_to(target)
        assert f"source: the link lib/link.py in {folder} {told}" in refusal(folder)
        (folder / "lib" / "link.py").unlink()


def test_folders_that_lead_into_each_other_are_refused(folder):
    (folder / "other").mkdir()
    (folder / "other" / "lib").symlink_to(folder / "lib")
    (folder / "lib" / "other").symlink_to(folder / "other")
    assert "the link lib/other/lib" in refusal(folder)


def test_a_source_that_no_path_can_name_is_a_mistake(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text('version: 1\nname: a\nprogram: a:B\nsource: "a\\0b"\npipeline: {stages: 1}\ntrain: {steps: 1}\n')
    with pytest.raises(CommandError, match="source: can't read"):
        jobfile.load(str(job))


def test_what_is_never_packed_may_lead_anywhere(folder, tmp_path):
    (folder / "venv").symlink_to(tmp_path)
    assert packed(folder) == {"lib/model.py": "x = 1\n"}


def test_what_can_not_be_read_is_told_by_name():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "closed").mkdir()
        (folder / "closed").chmod(0)
        with unprivileged():
            assert refusal(folder) == f"source: can't read {folder / 'closed'}: Permission denied"
        (folder / "closed").rmdir()
        (folder / "key.py").touch(mode=0)
        with unprivileged():
            assert refusal(folder) == f"source: can't read {folder / 'key.py'}: Permission denied"


@contextlib.contextmanager
def unprivileged():
    """Be somebody whom file modes bind: root reads everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
