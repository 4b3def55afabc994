"""The wires to other nodes: a small listener on the data address, and the measuring of a wire to a peer's listener.

A connection begins with the id of the node that is called, answered by the id of the one that is there: with addresses that
two hosts share, another one answers. Then come blocks, each answered by one byte: short ones for the latency, longer and longer
ones for the bandwidth. Everything is bounded on both sides, since whoever reaches the data network can connect. Built by
piped.node.app; called by piped.node.preflight.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

from piped.node.model import Edge, Peer

_HELLO = b"piped-edge 1 "
_BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_LONG_ENOUGH_S = 0.01  # of one block: then a longer one would tell no more, unless something else held it up
_NUM_PINGS = 5
_PIECE = 64 << 10
_MAX_BLOCKS = 16  # per connection
_MAX_CONNECTIONS = 64  # that are answered at once; the others wait
_CONNECTION_S = 30.0
ANSWER_S = 5.0  # for a peer that is well


class EdgeError(Exception):
    """The peer can't be reached; the text says what happened at which address.."""


class Listener:
    """Answers other nodes' calls."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._server: asyncio.Server | None = None
        self._gate = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._calls: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`, of its first address if it is a name; return "host:port". Raises OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        self._server = await asyncio.start_server(self._serve, str(found[0][4][0]), 0, limit=_PIECE)
        port = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """End it with every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._calls:
            writer.transport.abort()
        await asyncio.gather(*self._calls.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls[writer] = task
        try:
            async with asyncio.timeout(_CONNECTION_S), self._gate:
                await self._answer(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the peer left, or is none
        finally:
            del self._calls[writer]
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (await reader.readline()).startswith(_HELLO):
            return
        writer.write(f"{self._node_id}\n".encode())
        for _ in range(_MAX_BLOCKS):
            left = int.from_bytes(await reader.readexactly(8))
            if not 0 < left <= _BLOCKS[-1]:
                return
            while left:
                left -= len(await reader.readexactly(min(left, _PIECE)))
            writer.write(b".")
            await writer.drain()


async def call(
    peer: Peer, here: str, *, measures: bool = True, clock: Callable[[], float] = time.monotonic
) -> Edge | None:
    """Call `peer` from the address `here`; return what the wire to it is like if that is asked for. Raises EdgeError."""
    host, _, port = peer.probe_address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(here, 0))
    except TimeoutError:
        raise EdgeError(f"no connection to {peer.probe_address} within {ANSWER_S:g} s") from None
    except OSError as error:
        raise EdgeError(f"no connection to {peer.probe_address}: {error.strerror or error}") from error
    try:
        async with asyncio.timeout(ANSWER_S):
            await _greet(peer, reader, writer)
            return await _measure(peer.node_id, reader, writer, clock) if measures else None
    except TimeoutError:
        raise EdgeError(f"{peer.probe_address} took the connection and then said nothing for {ANSWER_S:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise EdgeError(f"{peer.probe_address} ended the connection: {error}") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            writer.transport.abort()


async def _greet(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_HELLO + f"{peer.node_id}\n".encode())
    answer = (await reader.readline()).decode(errors="replace").strip()
    if answer != peer.node_id:
        raise EdgeError(
            f"at {peer.probe_address} answers {f'node id {answer[:64]!r}' if answer else 'something else'}: two hosts have the address "
            f"{peer.data_address}"
        )


async def _measure(
    peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Callable[[], float]
) -> Edge:
    async def block(size: int) -> float:
        begun_s = clock()
        writer.write(size.to_bytes(8))
        writer.write(bytes(size))
        await reader.readexactly(1)
        return max(clock() - begun_s, 1e-9)

    rtt_s = min([await block(1) for _ in range(_NUM_PINGS)])
    rate, num_long = 0.0, 0
    for size in _BLOCKS:
        took_s = await block(size)
        rate = max(rate, size / took_s)
        num_long += took_s > _LONG_ENOUGH_S
        if num_long == 2:
            break
    return Edge(peer_id, rtt_s, rate)
