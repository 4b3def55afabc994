"""A TCP relay between our own processes: what a bad network does to a connection, at a moment that the test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Passes what arrives at `address` on to `target` ("host:port") and back; one thread per direction."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._passes_answers = threading.Event()
        self._passes_answers.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="relay-accept")]
        self._threads[0].start()

    @property
    def num_connections(self) -> int:
        """Return how many connections stand."""
        with self._lock:
            return len(self._open) // 2

    def cut(self) -> int:
        """End every connection; return how many there were."""
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(ends) // 2

    def withhold_answers(self) -> None:
        """From now on nothing that the target says arrives, until `cut` or `pass_answers`."""
        self._passes_answers.clear()

    def pass_answers(self) -> None:
        """Let what the target says arrive again."""
        self._passes_answers.set()

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._passes_answers.set()
        for thread in self._threads:
            thread.join(timeout=10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:  # as if the relay were not there
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink, answers in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink, answers), name="relay")
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    self._passes_answers.wait()
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(target: str) -> Iterator[Relay]:
    """Yield a relay to `target`; it is gone afterwards."""
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
