"""A small worker that speaks the line protocol and does what its first argument says. Standard library only."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


class Channel:
    def __init__(self):
        self.socket = socket.socket(fileno=int(os.environ["PIPED_FD"]))
        self.file = self.socket.makefile("r")

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self):
        return json.loads(self.file.readline())


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the real worker sets it
    channel = Channel()
    assign = channel.hear()
    assert assign["type"] == "assign", assign
    act = assign["spec"]["params"]["act"] if len(sys.argv) < 2 else sys.argv[1]
    print(f"rank {assign['rank']} acts {act}", flush=True)
    if assign["rank"] == 0:
        channel.say(type="store", endpoint="127.0.0.1:1234")
    else:
        assert channel.hear()["endpoint"] == "127.0.0.1:1234"
    channel.say(type="joined")
    ACTS[act](channel, assign)


def done(channel, assign):
    channel.say(type="done", step=7)


def fail(channel, assign):
    print("Traceback: boom", file=sys.stderr, flush=True)
    channel.say(
        type="failed", is_transport=False, is_numeric=False, peer_rank=-1, message="boom", traceback="tb", step=3
    )
    sys.exit(1)


def fail_at_sigterm(channel, assign):
    """What a victim does whose neighbour was stopped a moment earlier: its end is its own, whatever signal came."""
    signal.signal(signal.SIGTERM, lambda *_: fail(channel, assign))
    channel.say(type="beat", step=1, action="F0", section="step")
    while True:
        time.sleep(0.05)


def wait(channel, assign):
    step = 0
    while True:
        step += 1
        channel.say(type="beat", step=step, action="F0", section="step")
        time.sleep(0.05)


def ignore(channel, assign):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ignoring", flush=True)
    wait(channel, assign)


def polite(channel, assign):
    def leave(*_):
        print("leaving", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    print("ready to leave", flush=True)
    wait(channel, assign)


def litter(channel, assign):
    """Leave a child in a session of its own that keeps the output pipe."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    sys.exit(5)


def starve(channel, assign):
    """Take more memory than the rank may have."""
    channel.say(type="beat", step=1, action="F0", section="step")
    bytearray(1 << 30)


def hide(channel, assign):
    """Leave a child that nothing tells apart from any other process: a session, a parent and an environment of its own."""
    code = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], env={}, stdout=subprocess.DEVNULL, check=True)
    sys.exit(5)


def flood(channel, assign):
    block = b"x" * 65535 + b"\n"
    for _ in range(1200):
        os.write(1, block)


def flood_of_one_line(channel, assign):
    """200 MB without a newline, then wait for the file `go`."""
    block = b"x" * 1_000_000
    for _ in range(200):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.write(b"the last word\n")
    sys.stdout.flush()
    Path("written").touch()
    until_file(channel, assign)


def last_words(channel, assign):
    channel.say(type="done", step=1)
    os.write(2, b"\xff\xfe\x00 raw\n")
    os.write(1, b"y" * 60_000 + b" the end")
    os._exit(0)


def count_until_file(channel, assign):
    """A numbered line every 20 ms until the file `go` appears."""
    number = 0
    while not (Path(assign["attempt_dir"]) / "go").exists():
        number += 1
        print(f"line {number}", flush=True)
        time.sleep(0.02)
    print("the last word", flush=True)
    channel.say(type="done", step=number)


def babble(channel, assign):
    channel.socket.sendall(b"this is no message\n")
    time.sleep(600)


def until_file(channel, assign):
    """Report metrics until the file `go` of the attempt's directory appears, then exit with the number in it."""
    go = Path(assign["attempt_dir"]) / "go"
    step = 0
    while not go.exists():
        step += 1
        samples = [{"name": "piped_steps", "labels": {}, "value": step}]
        channel.say(type="metrics", samples=samples)
        channel.say(type="progress", step=step, steps=10, loss=0.5, tokens_per_s=10.0, step_s=0.05)
        time.sleep(0.05)
    code = int(go.read_text())
    if code == 0:
        channel.say(type="done", step=step)
    sys.exit(code)


PROCESS_ENDS = (done, fail, fail_at_sigterm, wait, ignore, polite, litter, starve, hide, until_file)
OUTPUTS = (flood, flood_of_one_line, last_words, count_until_file, babble)
ACTS = {function.__name__: function for function in (*PROCESS_ENDS, *OUTPUTS)}

if __name__ == "__main__":
    main()
