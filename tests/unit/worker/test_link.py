"""The worker's end of its channel: what it says and what it does when the shim is gone."""

import socket
import threading

import pytest

from piped.lines import LineReader
from piped.worker.link import Link, ShimGone

DEADLINE_S = 10.0


def linked():
    """Return a link, the shim's end of it, and an event that is set once the link finds the shim gone."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(DEADLINE_S)
    gone = threading.Event()
    return Link(ours.detach(), gone.set), theirs, gone


def test_everything_said_arrives_in_order():
    link, shim, _ = linked()
    link.send("joined")
    link.send("done", step=7, loss=0.5)
    link.flush()
    assert LineReader().feed(shim.recv(1 << 16)) == [{"type": "joined"}, {"type": "done", "step": 7, "loss": 0.5}]


def test_a_shim_that_is_gone_is_noticed_without_waiting_for_it():
    link, shim, gone = linked()
    shim.close()
    assert gone.wait(DEADLINE_S)
    with pytest.raises(ShimGone):
        link.receive("assign", timeout_s=DEADLINE_S)
