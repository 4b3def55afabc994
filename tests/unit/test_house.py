"""The house itself: its layout and the import rules that no linter knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOT_ENTRIES = {
    "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md",
    "proto", "daemon", "client", "stagekit", "deploy", "tests",
}  # fmt: skip
PACKAGES = {"stagekit": ROOT / "stagekit", "piped": ROOT / "daemon/piped", "pipectl": ROOT / "client/pipectl"}

# Contract 7: who may build a channel, a server, a database, a rendezvous store or start a thread of events.
BUILDERS = {
    "insecure_channel": {"client/pipectl/api.py", "daemon/piped/node"},
    "connect": {"daemon/piped/coordinator/store.py"},  # sqlite3.connect
    "TCPStore": {"daemon/piped/worker/train.py", "stagekit/testing.py"},
    "server": {"daemon/piped/coordinator/server.py", "daemon/piped/node/health.py"},  # grpc.aio.server
}
OWNERS = {"insecure_channel": "aio|grpc", "connect": "sqlite3", "TCPStore": "dist", "server": "aio"}


def tracked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def sources():
    return [path for package in PACKAGES.values() for path in sorted(package.rglob("*.py"))]


def test_the_root_holds_what_was_agreed_and_dotfiles():
    if not (ROOT / ".git").exists():
        pytest.fail("run from a checkout")
    entries = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {entry for entry in entries if not entry.startswith(".")} == ROOT_ENTRIES


def test_only_composition_roots_build_channels_servers_and_stores():
    wrong = []
    for path in sources():
        relative = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BUILDERS:
                name, owner = node.func.attr, ast.unparse(node.func.value).split(".")[-1]
                allowed = any(relative.startswith(place) for place in BUILDERS[name])
                if re.fullmatch(OWNERS[name], owner) and not allowed:
                    wrong.append(f"{relative}:{node.lineno} {owner}.{name}")
    assert wrong == []


def test_nothing_tracked_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/[\w.]")
    found = []
    for path in tracked():
        if (
            path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".proto", ""}
            and "_pb2" not in path.name
        ):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if pattern.search(line) and path != Path(__file__):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_no_pickle_is_read_from_a_network():
    using = [
        p.relative_to(ROOT).as_posix()
        for p in sources()
        if re.search(r"^\s*import pickle|_object_list", p.read_text(), re.M)
    ]
    assert using == ["stagekit/testing.py"]  # between a test and the processes that it started


def test_package_inits_are_import_free_or_lazy():
    for path in sources():
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ImportFrom):
                    assert node.module in {"__future__", "importlib", "typing"}, path
                assert not isinstance(node, ast.Import), path


def test_the_worker_starts_without_grpc():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"grpc", "google", "pipeapi", "aiohttp"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import piped.worker.main, piped.worker.train
assert "grpc" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
