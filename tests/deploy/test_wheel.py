"""The wheel that people install: both commands, the library, nothing of the tests."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_installs_both_commands_and_no_tests(tmp_path):
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(wheel, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    python = venv / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    # Dependencies are those of this environment, without its editable install.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for command in ("pipectl", "piped"):
        done = subprocess.run(
            [venv / "bin" / command, "--help"], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    code = "import stagekit, piped, pipectl, pipeapi.jobspec; print(stagekit.__file__)\ntry:\n import tests\nexcept ImportError: print('no tests')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert str(venv) in done.stdout and "no tests" in done.stdout, done.stdout + done.stderr
