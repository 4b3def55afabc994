"""One attempt's workers on this node: starts each at most once, stops them, tells the daemon what happens.

A single-threaded loop over descriptors that never waits for a peer. It outlives the node daemon: nothing here depends
on a connection. Decides only what must be decided at once and locally (kill what a dead worker left behind, SIGKILL
after the grace); whether and what to run or stop is the daemon's. Standard library only; called by piped.shim.main.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piped.cgroup import Kills, own_group
from piped.lines import VERSION, Message
from piped.shim import records, system
from piped.shim.link import Link
from piped.shim.outbox import Outbox
from piped.shim.rank import Ended, Rank

_EXIT_GRACE_S = 10.0  # at a SIGTERM to the shim itself, i.e. when the machine goes down
_ALIVE_S = 1.0
_SWEEP_S = 0.05
_DUMP_S = 0.2
_UNKILLABLE_S = 5.0  # after SIGKILL; a page of a dead file server, a frozen cgroup
# What a worker may say (piped.lines); a closed set, since the outbox keeps one message of each.
_WORKER_TYPES = frozenset({"store", "joined", "plan", "progress", "beat", "metrics", "failed", "done"})


class Supervisor:
    """The shim's state and loop."""

    def __init__(self, directory: Path, *, fence: int, job_id: str, marker: str, base_env: Mapping[str, str]) -> None:
        self._directory = directory
        self._fence = fence
        self._job_id = job_id
        self._marker = marker
        self._base_env = base_env
        self._group, self._is_told_of_groups = own_group(), False
        self._kills = Kills(self._group) if self._group is not None else None
        self._ranks: dict[int, Rank] = {}
        self._refused: dict[int, Message] = {}  # exits of ranks that could not even be recorded as started
        self._forwarded: dict[tuple[int, str], Message] = {}
        self._outbox = Outbox()
        self._link = Link(directory)
        self._selector = selectors.DefaultSelector()
        self._is_stopping = False
        self._kill_at_s: float | None = None
        self._is_leaving = False
        self._sweep_at_s: float | None = None
        self._give_up_at_s: float | None = None
        self._alive_at_s = 0.0

    def run(self) -> None:
        """Serve until told to quit with nothing left to do."""
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _: self._on_signal(wake_read))
        self._selector.register(self._link.listener, selectors.EVENT_READ, lambda _: self._on_connection())
        try:
            while not (self._is_leaving and self._is_empty()):
                for key, mask in self._selector.select(self._timeout_s()):
                    current = self._selector.get_map().get(key.fd)
                    if current is not None and current.data == key.data:  # an earlier callback may have closed it
                        key.data(mask)
                self._on_time()
                self._settle()
        finally:
            self._link.close()
            for rank in self._ranks.values():
                rank.close()
                rank.leave_group()

    # --- what wakes the loop

    def _on_signal(self, wake: socket.socket) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = wake.recv(4096)
        self._reap()
        if signal.SIGTERM in numbers:
            self._stop(_EXIT_GRACE_S)
            self._is_leaving = True

    def _on_connection(self) -> None:
        connection = self._link.accept()
        if connection is None:
            return
        self._drop_link()
        self._link.adopt(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._on_link)
        if self._link.send(self._hello()):
            self._outbox.resend()
        else:
            self._drop_link()

    def _on_link(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not self._link.flush():
            self._drop_link()
            return
        if mask & selectors.EVENT_READ:
            messages = self._link.read()
            self._reap()  # a worker that ended before a stop arrived was not ended by us
            try:
                for message in messages or ():
                    self._handle(message)
            except (KeyError, TypeError, ValueError) as error:  # never die of it: the workers would die with us
                print(
                    f"piped shim: dropped the daemon's connection: bad message: {error!r}", file=sys.stderr, flush=True
                )
                messages = None
            if messages is None:
                self._drop_link()

    def _on_channel(self, rank: Rank, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            rank.flush()
        if mask & selectors.EVENT_READ:
            self._relay(rank)

    def _on_time(self) -> None:
        now_s = time.monotonic()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = None
            for rank in self._running():
                rank.kill()
            self._give_up_at_s = now_s + _UNKILLABLE_S
            self._sweep()
        if self._give_up_at_s is not None and now_s >= self._give_up_at_s:
            self._give_up_at_s = None
            for rank in self._running():
                message: Message = {"type": "unkillable", "rank": rank.number, "boottime_ns": system.boottime_ns()}
                self._outbox.put(rank.number, "unkillable", message)
        if self._sweep_at_s is not None and now_s >= self._sweep_at_s:
            self._sweep()
        if now_s >= self._alive_at_s and self._running():  # a rank that is silent is so to one who listens
            self._alive_at_s = now_s + _ALIVE_S
            self._outbox.put(-1, "alive", {"type": "alive"})

    # --- what the daemon says

    def _handle(self, message: Message) -> None:
        match message["type"]:
            case "start":
                for order in message["ranks"]:
                    self._start(order)
            case "forward":
                self._forward(int(message["rank"]), message["message"])
            case "stop":
                self._stop(float(message["grace_s"]), dumps_stacks=bool(message.get("dumps_stacks")))
            case "ack":
                for rank, kind in message["keys"]:
                    self._outbox.acknowledge(int(rank), str(kind))
            case "quit":
                self._is_leaving = self._is_leaving or (self._is_empty() and not self._outbox.holds("exited"))

    def _start(self, order: dict[str, Any]) -> None:
        number = int(order["rank"])
        if number in self._ranks or number in self._refused or self._is_stopping:
            return
        rank = Rank(number, self._directory / "ranks" / str(number), self._marker)
        rank.on_close = self._unregister
        try:
            memory_bytes = int(order.get("memory_bytes") or 0)
            rank.start(
                order["argv"],
                order["env"],
                self._base_env,
                order["assign"],
                group=self._group,
                memory_bytes=memory_bytes,
            )
        except (OSError, ValueError) as error:  # a full disk, started before, or an assignment too long for a line
            self._refuse(number, f"piped shim: rank {number} is not started: {error}")
            return
        self._ranks[number] = rank
        if rank.undivided and not self._is_told_of_groups:
            self._is_told_of_groups = True
            told = "what is killed for want of memory is told by the shim's own cgroup, if that counts it"
            print(
                f"piped shim: ranks have no cgroup of their own ({rank.undivided}): {told}", file=sys.stderr, flush=True
            )
        if rank.pid:
            self._outbox.put(number, "spawned", self._spawned(rank))
        if rank.channel is not None:
            self._selector.register(rank.channel, selectors.EVENT_READ, lambda m, r=rank: self._on_channel(r, m))
        if rank.output is not None:
            self._selector.register(rank.output, selectors.EVENT_READ, lambda _, r=rank: r.read_output())

    def _refuse(self, number: int, reason: str) -> None:
        message: Message = {"type": "exited", "rank": number, "code": 126, "signal": None, "by_supervisor": False}
        message |= {"log_tail": reason, "boottime_ns": system.boottime_ns()}
        self._refused[number] = message
        self._outbox.put(number, "exited", message)

    def _forward(self, number: int, message: Message) -> None:
        rank, key = self._ranks.get(number), (number, str(message.get("type")))
        if rank is not None and self._forwarded.get(key) != message:  # the daemon repeats itself after a restart
            self._forwarded[key] = message
            rank.send(message)

    def _stop(self, grace_s: float, *, dumps_stacks: bool = False) -> None:
        self._is_stopping = True
        now_s = time.monotonic()
        for rank in self._running():
            if dumps_stacks:
                rank.dump_stacks()
            else:
                rank.stop(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        grace_s = max(grace_s, _DUMP_S) if dumps_stacks else grace_s
        self._kill_at_s = min(self._kill_at_s or now_s + grace_s, now_s + grace_s) if self._running() else None
        self._on_time()

    # --- what workers do

    def _relay(self, rank: Rank) -> None:
        messages = rank.read_channel()
        if messages and self._kills is not None:
            self._kills.sample()
        for message in messages:
            if message["type"] not in _WORKER_TYPES:
                rank.log(f"piped shim: dropped a message of unknown type {message['type']!r}\n".encode())
                continue
            wrapped = {"type": "worker", "rank": rank.number, "message": message, "boottime_ns": system.boottime_ns()}
            self._outbox.put(rank.number, str(message["type"]), wrapped)

    def _reap(self) -> None:
        by_pid = {rank.pid: rank for rank in self._running()}
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None or child.si_pid == 0:
                return
            rank = by_pid.pop(child.si_pid, None)
            if rank is not None:  # still a zombie: its process group id can't be another's yet
                is_exit = child.si_code == os.CLD_EXITED
                code, number = (child.si_status, None) if is_exit else (None, child.si_status)
                rank.end(Ended(code, number, system.boottime_ns()))
                if number == signal.SIGKILL and rank.leaf is None and self._kills is not None:
                    rank.oom_killed = self._kills.take()
                self._sweep_at_s = 0.0
            os.waitpid(child.si_pid, 0)

    def _settle(self) -> None:
        """Finish ranks that ended, then write what is due."""
        for rank in self._ranks.values():
            if rank.ended is not None and not rank.is_over:
                rank.read_output()
                self._relay(rank)
                if rank.is_drained:
                    self._finish(rank)
            elif rank.channel is not None:
                rank.flush()
                self._watch(rank.channel, rank.has_waiting)
        while self._link.is_idle and (message := self._outbox.next()) is not None:
            if not self._send(message):
                self._drop_link()
        if self._link.connection is not None:
            self._watch(self._link.connection, self._link.has_unsent)

    def _send(self, message: Message) -> bool:
        try:
            return self._link.send(message)
        except ValueError:  # wrapping made it longer than a line may be
            number = int(message["rank"])
            if number in self._ranks:
                self._ranks[number].log(b"piped shim: a message was too long to pass on and was dropped\n")
            return True

    def _finish(self, rank: Rank) -> None:
        message = rank.exit_message()
        self._outbox.put(rank.number, "exited", message)
        record = {k: v for k, v in message.items() if k not in ("type", "rank")}
        record["messages"] = {k: v for k, v in rank.last_messages.items() if k in ("failed", "done")}
        rank.close()
        rank.is_over = True
        with contextlib.suppress(OSError):  # the exit travels over the socket even if it can't be recorded
            records.write_exit(rank.directory, record)

    def _sweep(self) -> None:
        """Kill what ranks that are over have left, by their groups and as adopted children; look again while there is any."""
        running = {rank.pid for rank in self._running()}
        numbers = {str(rank.number) for rank in self._running()}
        left = [rank for rank in self._ranks.values() if rank.ended is not None and not rank.leave_group()]
        is_dirty = bool(left)
        for pid in system.live_children():
            if pid in running:
                continue
            owner = system.environment_value(pid, "PIPED_RANK")
            if not numbers or (owner is not None and owner not in numbers):
                is_dirty = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._sweep_at_s = time.monotonic() + _SWEEP_S if is_dirty else None

    # --- small things

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.ended is None]

    def _is_empty(self) -> bool:
        return all(rank.is_over for rank in self._ranks.values())

    def _hello(self) -> Message:
        ranks: dict[str, Any] = {}
        for number, rank in self._ranks.items():
            end = rank.ended
            ranks[str(number)] = {
                "state": "exited" if rank.is_over else "spawned",
                "pid": rank.pid,
                "starttime": rank.starttime,
                "code": end.code if end else None,
                "signal": end.signal if end else None,
                "by_supervisor": rank.by_supervisor,
            }
        for number in self._refused:
            ranks[str(number)] = {"state": "exited", "pid": 0, "starttime": 0, "code": 126, "signal": None}
            ranks[str(number)]["by_supervisor"] = False
        hello: Message = {"type": "hello", "version": VERSION, "fence": self._fence, "job_id": self._job_id}
        return hello | {"pid": os.getpid(), "ranks": ranks}

    @staticmethod
    def _spawned(rank: Rank) -> Message:
        message: Message = {"type": "spawned", "rank": rank.number, "pid": rank.pid, "starttime": rank.starttime}
        return message | {"boottime_ns": system.boottime_ns()}

    def _timeout_s(self) -> float | None:
        moments = [m for m in (self._kill_at_s, self._sweep_at_s, self._give_up_at_s) if m is not None]
        moments += [self._alive_at_s] if self._running() else []
        moments += [r.drain_until_s for r in self._ranks.values() if r.ended is not None and not r.is_over]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _watch(self, connection: socket.socket, wants_write: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
        key = self._selector.get_key(connection)
        if key.events != events:
            self._selector.modify(connection, events, key.data)

    def _unregister(self, descriptor: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def _drop_link(self) -> None:
        if self._link.connection is not None:
            self._unregister(self._link.connection)
            self._link.drop()
