"""Transports: how bytes move between two pipeline ranks. Two calls and a wait; no schedule knowledge.

A transport has the shape of a c10d backend, so that for gloo it *is* the backend, without a Python call between (2.5 µs
a post against 5 through torch.distributed). Tensors on the wire are dense (`wire_view`), so strides are kept: the
receiver's buffer has the same layout. Gloo matches by tag; NCCL ignores tags, so each direction has a communicator of
its own and the verified order per channel does the matching.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stagekit.errors import PeerError


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until it ended, once. Raises RuntimeError if the other side is gone or silent; `settle` makes it typed."""
        ...

    def is_completed(self) -> bool:
        """Say whether `wait` is over; gloo blocks for ever in a second one."""
        ...


class Transport(Protocol):
    """Point-to-point between the pipeline ranks of one replica. Tensors stay untouched until their work's `wait`
    returned. Both calls return at once and raise RuntimeError where the connection is gone.
    """

    def send(self, tensors: list[Tensor], dstRank: int, tag: int, /) -> Work | None:
        """Start sending the one dense tensor in `tensors` to that pipeline rank; None: it may be used again already."""
        ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int, /) -> Work:
        """Start receiving into the one tensor in `tensors`, whose size equals the message's."""
        ...


def towards(transport: Transport, peer: int) -> Transport:
    """Return what moves tensors to and from that one rank, called with it like `transport`, with fewer calls on the way."""
    narrow = getattr(transport, "towards", None)
    return transport if narrow is None else cast(Transport, narrow(peer))


def gloo_transport(group: dist.ProcessGroup) -> Transport:
    """Return the transport of CPU tensors over a gloo process group: the backend itself."""
    return cast(Transport, group._get_backend(torch.device("cpu")))


class MixedTransport:
    """Some peers over one transport, some over another."""

    def __init__(self, by_peer: Mapping[int, Transport]) -> None:
        self._by_peer = by_peer

    def towards(self, peer: int) -> Transport:
        """Return what that peer is reached through."""
        return towards(self._by_peer[peer], peer)

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work | None:
        return self._by_peer[peer].send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        return self._by_peer[peer].recv(tensors, peer, tag)


class NcclTransport:
    """CUDA tensors over two NCCL communicators: one from lower to higher ranks, one back. A work's `wait` orders the
    current stream after the transfer and does not block the host.
    """

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, rank: int) -> None:
        device = torch.device("cuda")
        self._up: Any = up._get_backend(device)
        self._down: Any = down._get_backend(device)
        self._rank = rank

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        work: Work = (self._up if peer > self._rank else self._down).send(tensors, peer, 0)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        work: Work = (self._up if peer < self._rank else self._down).recv(tensors, peer, 0)
        return work


def lost(peer: int, error: RuntimeError) -> PeerError:
    """Return what to raise for a transfer that failed."""
    return PeerError(f"transfer with pipeline rank {peer}: {error}", peer_rank=peer)


def settle(work: Work | None, peer: int) -> None:
    """Block until the transfer ended, if nobody did yet. Raises PeerError if the other side is gone or silent."""
    try:
        if work is not None and not work.is_completed():
            work.wait()
    except RuntimeError as error:
        raise lost(peer, error) from error


def wire_view(tensor: Tensor) -> Tensor:
    """Return a contiguous view of the dense storage of `tensor`: itself where it is contiguous, else flat.

    Of one that is conjugated or negated only in name a copy in which it is: bytes travel, such marks don't.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())


def on_wire(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return `tensor` in the agreed layout and dense, copying where the layout differs."""
    if tensor.stride() == stride:
        return wire_view(tensor.detach())
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return wire_view(copy.copy_(tensor.detach()))


@dataclass(slots=True)
class Buffer:
    """A receive buffer, what the transport sees of it, and what the pool needs to know of it."""

    tensor: Tensor
    wire: Tensor
    size_bytes: int
    free: list[Buffer]  # where it lies when nobody uses it
    storage: Any
    unshared: int  # uses of its storage by `tensor` and `wire` alone


class BufferPool:
    """Free receive buffers by (shape, stride, dtype); holds as many as were in flight at once, not one per chunk.

    A buffer that something still reads (autograd may keep a gradient as a view of what it was given) is not reused. A
    layout that no step of the last KEPT_STEPS used is forgotten: lengths of text may differ from step to step.
    """

    KEPT_STEPS = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[tuple[Any, ...], list[Buffer]] = defaultdict(list)
        self._used: dict[tuple[Any, ...], int] = {}  # the step that used a layout last
        self._step = 0
        self.num_buffers = 0

    def begin_step(self) -> None:
        """Forget free buffers of layouts that were not used lately."""
        self._step += 1
        for layout in [layout for layout, step in self._used.items() if step < self._step - self.KEPT_STEPS]:
            del self._used[layout]
            free = self._free.pop(layout)
            self.num_buffers -= len(free)
            free.clear()  # buffers and their list hold each other

    def take(self, layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> Buffer:
        """Return a buffer of that shape, stride and dtype."""
        free = self._free[layout]
        self._used[layout] = self._step
        if free:
            return free.pop()
        self.num_buffers += 1
        shape, stride, dtype = layout
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
        wire = wire_view(tensor)
        storage = tensor.untyped_storage()._cdata
        return Buffer(tensor, wire, wire.nbytes, free, storage, torch._C._storage_Use_Count(storage))

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer that its user is done with."""
        if torch._C._storage_Use_Count(buffer.storage) <= buffer.unshared:
            buffer.free.append(buffer)
        else:
            self.num_buffers -= 1
