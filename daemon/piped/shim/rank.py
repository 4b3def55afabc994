"""One worker process: its start, its two pipes, its end. Decides nothing about others.

The worker leads a process group of its own and gets one end of a socketpair (PIPED_FD) for messages; stdout and stderr
share one pipe, so that their order is kept. Standard library only; called by piped.shim.supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piped.cgroup import Group, Kills
from piped.lines import MAX_LINE_BYTES, LineReader, Message, encode
from piped.shim import records, system
from piped.shim.environment import worker_environment
from piped.shim.logfile import LogFile

DUMP_SIGNAL = signal.SIGQUIT  # the worker has faulthandler answer it (piped.worker.main)
DRAIN_S = 0.5  # how long after its end a worker's output may still arrive, e.g. from a child that kept the pipe
_CHUNK_BYTES = 64 << 10
_CANNOT_START = 127  # as a shell says it
_MAX_WAITING_BYTES = 4 * MAX_LINE_BYTES  # to a worker that does not read


@dataclass(slots=True)
class Ended:
    """How a worker ended; exactly one of code and signal is set."""

    code: int | None
    signal: int | None
    boottime_ns: int


class Rank:
    """A started rank. `channel` and `output` are non-blocking descriptors for the caller's selector, None once closed."""

    def __init__(self, number: int, directory: Path, marker: str) -> None:
        self.number = number
        self.directory = directory
        self.pid = 0
        self.starttime = 0
        self._stopped_with: signal.Signals | None = None  # the first signal of a stop
        self._sent: set[int] = set()  # the signals that reached it alive
        self.ended: Ended | None = None
        self.oom_killed = False
        self.is_over = False  # ended, drained and recorded
        self.drain_until_s = 0.0
        self.channel: socket.socket | None = None
        self.output: int | None = None
        self.last_messages: dict[str, Message] = {}
        self.leaf: Group | None = None  # the processes of this rank
        self.kills: Kills | None = None  # those of the leaf
        self.undivided = ""  # why it has none
        self._marker = marker
        self._reader = LineReader()
        self._waiting = bytearray()
        self._log: LogFile | None = None

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        base_env: Mapping[str, str],
        assign: Message,
        *,
        group: Group | None,
        memory_bytes: int,
    ) -> None:
        """Record the start durably, then exec. A worker that can't be started ends with code 127 and says why in its log.

        `group` is divided for it, with a limit of `memory_bytes` (0: none); where it can't be, the log says so.

        Raises FileExistsError if it was started before, OSError if the start can't be recorded, ValueError for an
        assignment above MAX_LINE_BYTES; then nothing was started.
        """
        encode(assign)
        records.mark_started(self.directory, {"boottime_ns": system.boottime_ns()})
        self._log = LogFile(self.directory)
        self._divide(group, memory_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        environment = worker_environment(
            base_env, env, rank=self.number, descriptor=theirs.fileno(), marker=self._marker
        )
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=environment,
                cwd=self.directory,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except OSError as error:
            self._log.write(f"piped shim: can't start {argv[0]!r}: {error.strerror}\n".encode())
            ours.close()
            os.close(read_end)
            self.end(Ended(_CANNOT_START, None, system.boottime_ns()))
            return
        finally:
            theirs.close()
            os.close(write_end)
        if self.leaf is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self.leaf.add(process.pid)
        self.pid, self.starttime = process.pid, system.starttime(process.pid)
        process.returncode = 0  # the supervisor reaps; keep subprocess from trying
        ours.setblocking(False)
        os.set_blocking(read_end, False)
        self.channel, self.output = ours, read_end
        self.send(assign)

    def send(self, message: Message) -> None:
        """Queue a line for the worker; `flush` writes it."""
        if self.channel is not None and self.ended is None:
            self._waiting += encode(message)
            if len(self._waiting) > _MAX_WAITING_BYTES:
                self.fail(f"does not read its messages: {len(self._waiting)} bytes wait on PIPED_FD")

    @property
    def has_waiting(self) -> bool:
        """Say whether `flush` has something to write."""
        return bool(self._waiting) and self.channel is not None

    def flush(self) -> None:
        """Write what the worker takes without blocking."""
        while self._waiting and self.channel is not None:
            try:
                sent = self.channel.send(self._waiting[:_CHUNK_BYTES], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # it closed its end; its exit follows, or it wants no more messages
                self._waiting.clear()
                return
            del self._waiting[:sent]

    def read_channel(self) -> list[Message]:
        """Return the messages that arrived; closes the channel at its end."""
        messages: list[Message] = []
        try:
            while self.channel is not None:
                data = self.channel.recv(_CHUNK_BYTES)
                if not data:
                    self.close_channel()
                    break
                messages += self._reader.feed(data)
                if len(messages) > 256:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.close_channel()
        except ValueError as error:  # not our protocol: user code wrote there, or the worker is broken
            self.fail(f"wrote no message line to PIPED_FD: {error}")
        for message in messages:
            self.last_messages[str(message["type"])] = message
        if messages and self.kills is not None:
            self.kills.sample()
        return messages

    def read_output(self, limit: int = 16) -> None:
        """Move at most `limit` chunks of stdout and stderr to the log; closes the pipe at its end."""
        for _ in range(limit):
            if self.output is None:
                return
            try:
                data = os.read(self.output, _CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close_output()
                return
            self.log(data)

    def log(self, data: bytes) -> None:
        """Append to the rank's log."""
        if self._log is not None:
            self._log.write(data)

    def _divide(self, group: Group | None, memory_bytes: int) -> None:
        try:
            if group is None:
                raise OSError("no cgroup here counts memory")
            self.leaf = group.leaf(self._marker, self.number, memory_bytes)
            self.kills = Kills(self.leaf)
        except OSError as error:
            self.undivided = str(error)
            if memory_bytes:
                self.log(f"piped shim: nothing holds this rank to {memory_bytes} bytes of memory: {error}\n".encode())

    def leave_group(self) -> bool:
        """Kill what is left in the rank's cgroup and remove it; False while something is left."""
        if self.leaf is not None:
            self.leaf.kill()
            if not self.leaf.remove():
                return False
            self.leaf = self.kills = None
        return True

    def fail(self, reason: str) -> None:
        """Say `reason` in the log and end the worker: it broke the contract."""
        self.log(f"piped shim: the worker {reason}\n".encode())
        self.close_channel()
        self.kill()

    def dump_stacks(self) -> None:
        """Have a worker that will be killed write its stacks into its log; one that is stopped can't."""
        if self._stopped_with is None:
            self._stopped_with = signal.SIGKILL
            if self.pid and self.ended is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, DUMP_SIGNAL)

    def stop(self, number: signal.Signals) -> None:
        """Begin to end the worker, once: SIGTERM asks, SIGKILL (which `kill` repeats) does not."""
        if self._stopped_with is None:
            self._stopped_with = number
            self._signal(number)

    def kill(self) -> None:
        """End the worker and its process group at once."""
        self._signal(signal.SIGKILL)

    @property
    def by_supervisor(self) -> bool:
        """Say whether a stop ended it, rather than that it ended by itself while the stop was under way."""
        if self._stopped_with is None or self.ended is None:
            return False
        if self.ended.signal is not None:
            return self.ended.signal in self._sent
        is_caught = self._stopped_with is signal.SIGTERM  # it may have: an exit code then answers the signal
        return is_caught and not self.last_messages.keys() & {"failed", "done"}

    def end(self, ended: Ended) -> None:
        """Note the exit; what is left of its group dies with it."""
        self.ended = ended
        if self.leaf is not None:
            self.oom_killed = (ended.code != 0) and self.kills is not None and self.kills.take()
        self.drain_until_s = time.monotonic() + DRAIN_S
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def is_drained(self) -> bool:
        """Say whether everything that it said is read, or waited for long enough."""
        if self.ended is None:
            return False
        return (self.channel is None and self.output is None) or time.monotonic() >= self.drain_until_s

    def exit_message(self) -> Message:
        """Return the `exited` message."""
        assert self.ended is not None
        return {
            "type": "exited",
            "rank": self.number,
            "code": self.ended.code,
            "signal": self.ended.signal,
            "by_supervisor": self.by_supervisor,
            "oom_killed": self.oom_killed,
            "log_tail": self._log.tail() if self._log else "",
            "boottime_ns": self.ended.boottime_ns,
        }

    def close(self) -> None:
        """Release every descriptor."""
        self.close_channel()
        self.close_output()
        if self._log is not None:
            self._log.close()
            self._log = None

    def close_channel(self) -> None:
        """Close our end of the message channel. The caller has taken it out of its selector or does so by `channel`."""
        if self.channel is not None:
            self._on_close(self.channel)
            self.channel.close()
            self.channel = None
            self._waiting.clear()

    def close_output(self) -> None:
        """Close our end of the output pipe."""
        if self.output is not None:
            self._on_close(self.output)
            os.close(self.output)
            self.output = None

    on_close: Callable[[socket.socket | int], None] | None = None
    """Called with a descriptor just before it closes."""

    def _on_close(self, descriptor: socket.socket | int) -> None:
        if self.on_close is not None:
            self.on_close(descriptor)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid and self.ended is None:
            if not system.is_exiting(self.pid):
                self._sent.add(number)
            system.signal_group(self.pid, number)
