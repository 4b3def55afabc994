"""`pipectl demo`: it ends with the loss that it trained to, and leaves nothing behind however it is ended."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster import processes_of, wait_for_no_process_of, wait_until

START_S = 120.0  # two cores, and other tests
STOP_S = 20.0


class Demo:
    """A running demo; everything that it starts inherits its TMPDIR, which no other process has."""

    def __init__(self, folder, steps):
        self.folder, self.output = folder, folder / "output"
        self.mark = f"TMPDIR={folder}"
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "pipectl", "demo", "--steps", str(steps)]
        self.began_s = time.monotonic()
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def text(self):
        return self.output.read_text(errors="replace")

    def files(self, pattern):
        return list(self.folder.glob(f"pipectl-demo-*/{pattern}"))

    def commands(self):
        """Return the command lines of its processes, by pid."""
        return processes_of(None, {self.mark})

    def wait_for(self, what, condition):
        def reached():
            assert self.process.poll() is None, f"the demo ended before {what}:\n{self.text()}"
            return condition()

        return wait_until(reached, START_S, what, every_s=0.01)

    def check_nothing_is_left(self):
        left = wait_for_no_process_of(None, {self.mark})
        assert not left, f"processes left: {left}"
        assert not self.files(""), "the temporary folder is still there"


@contextmanager
def running(folder, *, steps):
    demo = Demo(folder, steps)
    try:
        yield demo
        demo.check_nothing_is_left()
    finally:
        if demo.process.poll() is None:
            demo.process.send_signal(signal.SIGTERM)
            demo.process.wait(STOP_S)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_demo_trains_in_4_workers_of_2_daemons_and_ends_with_the_exported_loss(tmp_path):
    with running(tmp_path, steps=12) as demo:
        demo.wait_for("training", lambda: ": step " in demo.text())
        commands = demo.commands()
        workers = [pid for pid, command in commands.items() if " piped worker" in command]
        daemons = [pid for pid, command in commands.items() if " piped node " in command]
        assert len(workers) == 4 and len(daemons) == 2
        assert {parent(parent(pid)) for pid in workers} == set(daemons)
        assert demo.process.wait(START_S) == 0, demo.text()
    lines = demo.text().splitlines()
    final = re.fullmatch(r"final loss (\d+\.\d+)", lines[-1])
    exported = re.search(r'^metrics  piped_loss\{job_id="j-\w+"\} (\S+)$', demo.text(), re.MULTILINE)
    assert final and exported and exported[1] == final[1]
    last = [line for line in lines if line.startswith("SUCCEEDED: ")][-1]
    assert last.startswith(f"SUCCEEDED: step 12/12, loss {float(final[1]):.4f}")


MOMENTS = {
    "0.2 s are over": lambda demo: time.monotonic() > demo.began_s + 0.2,
    "the coordinator is up": lambda demo: demo.files("coordinator/endpoints.json"),
    "workers are spawned": lambda demo: len(demo.files("node*/attempts/*/ranks/*/started")) == 4,
    "it trains": lambda demo: ": step " in demo.text(),
    "the report prints": lambda demo: "loss by step" in demo.text(),
}
SIGNALS = {
    "Ctrl-C": lambda demo: os.killpg(demo.process.pid, signal.SIGINT),  # as a terminal does
    "SIGINT": lambda demo: demo.process.send_signal(signal.SIGINT),
    "SIGTERM": lambda demo: demo.process.send_signal(signal.SIGTERM),
}
QUICK = {
    ("0.2 s are over", "Ctrl-C"),
    ("the coordinator is up", "SIGTERM"),
    ("workers are spawned", "SIGINT"),
    ("it trains", "Ctrl-C"),
}
CASES = [
    pytest.param(moment, how, marks=[] if (moment, how) in QUICK else pytest.mark.soak)
    for moment in MOMENTS
    for how in SIGNALS
]


@pytest.mark.parametrize(("moment", "how"), CASES)
def test_an_interrupted_demo_ends_with_130_and_leaves_nothing(tmp_path, moment, how):
    with running(tmp_path, steps=40) as demo:
        demo.wait_for(moment, lambda: MOMENTS[moment](demo))
        SIGNALS[how](demo)
        status = demo.process.wait(STOP_S)
    # While modules are imported, the signal itself may end the process: a shell says 130 or 143.
    is_early = moment == "0.2 s are over" and status in (-signal.SIGINT, -signal.SIGTERM)
    assert status == 130 or is_early, demo.text()
