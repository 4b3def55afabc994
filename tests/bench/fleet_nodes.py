"""Simulated nodes for tests/bench/fleet.py: each speaks the real session over a connection of its own, and runs nothing.

`python -m tests.bench.fleet_nodes ADDRESS COUNT SLOTS` registers them, prints a line of JSON once all are in, and another one for every
line that it reads: beats since the last one, their round trips and what ended sessions. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from pipeapi.v1 import nodes_pb2
from tests.integration.coordinator.scripted import OPTIONS, ScriptedNode

AT_ONCE = 100  # registrations under way


@dataclass
class Seen:
    """What all nodes of this process saw since the last report."""

    round_trips_s: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)  # by why

    def report(self) -> dict[str, Any]:
        """Return it as JSON, and begin again."""
        trips = sorted(self.round_trips_s)
        told = {
            "beats": len(trips),
            "p50_s": trips[len(trips) // 2] if trips else 0.0,
            "p99_s": trips[len(trips) * 99 // 100] if trips else 0.0,
            "ended": self.ended,
            "cpu_s": time.process_time(),
        }
        self.round_trips_s, self.ended = [], Counter()
        return told


@dataclass
class SimulatedNode(ScriptedNode):
    """A node that beats as a daemon does and measures how soon each beat is acknowledged."""

    seen: Seen = field(default_factory=Seen)
    is_in: asyncio.Event = field(default_factory=asyncio.Event)
    beat_s: float = 1.0

    async def hold(self, gate: asyncio.Semaphore) -> None:
        """Keep a session, and say so in `is_in`."""
        while True:
            await gate.acquire()
            self._release = gate.release
            async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
                try:
                    await self._session(channel)
                except Exception as error:
                    self.seen.ended[type(error).__name__ + " " + str(error)[:300]] += 1
                else:
                    self.seen.ended[str(self.errors[-1:])] += 1
            self._let_go()
            await asyncio.sleep(random.uniform(0.5, 1.5))

    def _let_go(self) -> None:
        release, self._release = self._release, lambda: None
        release()

    async def _beat(self, call: Any) -> None:
        self._let_go()
        self.is_in.set()
        assert self.welcome is not None
        self.beat_s, beat_seq = self.welcome.beat_s, 0
        self._sent_s: dict[int, float] = {}
        await asyncio.sleep(random.uniform(0, self.beat_s))
        while True:
            beat_seq += 1
            self._sent_s[beat_seq] = time.monotonic()
            beat = nodes_pb2.Beat(beat_seq=beat_seq, desired_rev=self.desired_rev)
            await self._write(call, nodes_pb2.SessionRequest(beat=beat))
            await asyncio.sleep(self.beat_s)

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("beat_ack"):
                ack = message.beat_ack
                self.seen.round_trips_s.append(time.monotonic() - self._sent_s.pop(ack.beat_seq))
                self.beat_s = ack.beat_s or self.beat_s
            else:
                self.take(message)
        self.errors.append(await call.code())


async def main(address: str, count: int, slots: int) -> None:
    """Hold `count` nodes until the standard input ends."""
    seen, gate = Seen(), asyncio.Semaphore(AT_ONCE)
    nodes = [SimulatedNode(address, f"sim-{number:05d}", slots, seen=seen) for number in range(count)]
    tasks = [asyncio.create_task(node.hold(gate)) for node in nodes]
    began_s = time.monotonic()
    await asyncio.gather(*(node.is_in.wait() for node in nodes))
    print(json.dumps({"registered": count, "in_s": time.monotonic() - began_s}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(seen.report()), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
