"""Process groups of a deployed pipeline: world rank = replica × pipeline ranks + pipeline rank.

The group that is handed in is the world; a pipeline group joins the ranks of one replica, a replicas group the ranks
that hold the same stages. Without a process group there is one rank and nothing to communicate.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stagekit.errors import BugError, PeerError, RemoteError, StagekitError, UserError
from stagekit.run.agreement import exchange_text
from stagekit.run.alarm import Alarm
from stagekit.run.layout import TAG_CLOCK, TAG_STATUS
from stagekit.run.shm.helper import Helper
from stagekit.run.shm.setup import VARIABLE, connect
from stagekit.run.shm.transport import ShmTransport
from stagekit.run.transport import MixedTransport, NcclTransport, Transport, Work, gloo_transport, settle

CLOCK_ROUNDS = 8
WAIT_TIMEOUT = timedelta(hours=1)  # the launcher gives up earlier
_SPARE_NUMBERS = 64  # of groups that a caller may make while a pipeline is deployed, in `parallelize`
_number = 0  # of the last group that this process made, see Note [Names of groups]
_meshes: dict[tuple[object, ...], tuple[dist.ProcessGroup, DeviceMesh]] = {}  # by device type and ranks
_used: Counter[str] = Counter()  # per prefix, so that no key of the store is used twice


class NoTransport:
    """For a single rank: nothing is ever sent."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        raise BugError("a single rank has nobody to send to")

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        raise BugError("a single rank has nobody to receive from")


class Groups:
    """This rank's place and its communicators. Made on every rank of the world in the same order."""

    def __init__(
        self, pipeline_ranks: int, replicas: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._world: dist.ProcessGroup | None = None
        self.pipeline: dist.ProcessGroup | None = None
        self.replicas: dist.ProcessGroup | None = None
        self.comm_device = torch.device("cpu")
        self.global_rank = self.pipeline_rank = self.replica = 0
        self._num_replicas = replicas
        self._transport: Transport = NoTransport()
        self.transports: dict[int, str] = {}  # by the pipeline rank of each peer: "shm", "gloo" or "nccl"
        self._close: Callable[[], object] = _nothing
        if not dist.is_initialized():
            return
        self._world = group or dist.group.WORLD
        members = dist.get_process_group_ranks(self._world)
        self.global_rank = dist.get_rank(self._world)
        self.replica, self.pipeline_rank = divmod(self.global_rank, pipeline_ranks)
        is_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend(self._world))
        self.comm_device = device if is_nccl else torch.device("cpu")
        assert self._world is not None
        _agree_on_numbers(self._world, self.comm_device)
        self._made: list[dist.ProcessGroup] = []
        if not is_nccl:  # which may wait for other ranks: only on `close`
            weakref.finalize(self, _destroy, self._made).atexit = False
        rows = [members[r * pipeline_ranks : (r + 1) * pipeline_ranks] for r in range(replicas)]
        self._members, self._num_replicas = rows[self.replica], replicas
        if pipeline_ranks > 1:
            self.pipeline = self._world if replicas == 1 else self._new_group(self._members)
            self._transport = self._make_transport(is_nccl, device)
        if replicas > 1:
            self.replicas = self._new_group([row[self.pipeline_rank] for row in rows])

    def _new_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        group = _numbered_group(members)
        self._made.append(group)
        return group

    def _make_transport(self, is_nccl: bool, device: torch.device) -> Transport:
        assert self.pipeline is not None
        peers = [rank for rank in range(len(self._members)) if rank != self.pipeline_rank]
        if is_nccl:
            self.transports = dict.fromkeys(peers, "nccl")
            return NcclTransport(self._new_group(self._members), self._new_group(self._members), self.pipeline_rank)
        gloo = gloo_transport(self.pipeline)
        shm, helper, refused = self._share_memory(self.pipeline, device)
        self.transports = {peer: "gloo" if peer in refused else "shm" for peer in peers}
        if shm is None or helper is None:
            return gloo
        self._close = weakref.finalize(shm, helper.close)
        return MixedTransport({peer: gloo if peer in refused else shm for peer in peers}) if refused else shm

    def _share_memory(
        self, pipeline: dist.ProcessGroup, device: torch.device
    ) -> tuple[ShmTransport | None, Helper | None, dict[int, str]]:
        backend: Any = pipeline._get_backend(torch.device("cpu"))
        return connect(
            self.pipeline_rank,
            len(self._members),
            lambda text: exchange_text(text, pipeline, self.comm_device),
            mode=os.environ.get(VARIABLE, "auto"),
            refused=None if device.type == "cpu" else f"its tensors lie on {device.type}",
            timeout_s=backend.options._timeout.total_seconds(),
            replicas=self._num_replicas,
        )

    def close(self) -> None:
        """Give back what transfers between this rank's pipeline ranks hold, and the groups that were made for them; none
        may be started or awaited afterwards. Connections end once nobody refers to the run.

        Done by itself once nobody refers to the transport, and when the process ends.
        """
        self._close()
        if self._world is not None:
            _destroy(self._made)

    def transport(self) -> Transport:
        """Return the point-to-point transport of this rank's pipeline."""
        return self._transport

    def alarm(self) -> Alarm | None:
        """Return what tells every rank of an error; None for a single rank, which has nobody to tell."""
        if self._world is None or dist.get_world_size(self._world) == 1:
            return None
        store, key = dist.distributed_c10d._get_default_store(), self._new_key("error")
        return Alarm(store, key, self.global_rank, dist.get_world_size(self._world))

    def _new_key(self, purpose: str) -> str:
        """Return a key of the store that every rank of the world gets alike, and nobody got before."""
        members = repr(dist.get_process_group_ranks(self._world)).encode()
        prefix = f"stagekit/{purpose}/{hashlib.sha256(members).hexdigest()[:16]}"
        _used[prefix] += 1
        return f"{prefix}/{_used[prefix]}"

    @functools.cached_property
    def replica_mesh(self) -> DeviceMesh:
        """The ranks that hold this rank's stages, as a mesh of one dimension. First asked for on every rank alike.

        The same for every run of the process on these ranks, and not destroyed with one: torch keeps what it worked out for
        a mesh, and takes it for every equal one, with the group of the first.
        """
        if self._world is None:
            raise UserError(
                "parallelize needs a process group; call stagekit.init() or torch.distributed.init_process_group"
            )
        own = [self._members[self.pipeline_rank]]
        ranks = own if self.replicas is None else dist.get_process_group_ranks(self.replicas)
        key, alive = (self.comm_device.type, *ranks), dist.distributed_c10d._world.pg_map
        if key in _meshes and _meshes[key][0] in alive:  # else the whole world was destroyed meanwhile
            _next_number()  # as on ranks that make theirs now
        else:
            group = _numbered_group(ranks)
            mesh = DeviceMesh.from_group(group, self.comm_device.type, mesh_dim_names=("replicas",))
            _meshes[key] = (group, mesh)
        return _meshes[key][1]

    def more_replicas(self, is_wanted: bool) -> dist.ProcessGroup | None:
        """Return another group of the ranks in `replicas`, whose collectives keep an order of their own, if any rank of
        the world wants one. Called on every rank.
        """
        if self.replicas is None or not self.any_of_world(is_wanted):
            return None
        return self._new_group(dist.get_process_group_ranks(self.replicas))

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return a group of these pipeline ranks for a member, None for others and for a single rank. Called on every rank."""
        if len(ranks) < 2 or self.pipeline is None:
            return None
        if self.pipeline_rank not in ranks:
            _next_number()  # Note [Names of groups]
            return None
        return self._new_group([self._members[rank] for rank in ranks])

    def barrier(self) -> None:
        """Wait for every rank of the world."""
        if self._world is not None:
            dist.barrier(group=self._world)

    def wait_for_everyone(self) -> None:
        """Wait for every rank of the world over the store, where no collective's timeout counts: compiling takes long.

        Raises PeerError after an hour, or when the store is gone.
        """
        if self._world is None:
            return
        store = dist.distributed_c10d._get_default_store()
        key = self._new_key("wait")
        try:
            if store.add(key, 1) % dist.get_world_size(self._world) == 0:
                store.set(f"{key}/all", "1")
            store.wait([f"{key}/all"], WAIT_TIMEOUT)
        except RuntimeError as error:
            raise PeerError(f"waiting for the other ranks to compile: {error}") from error

    def count_replicas(self, flag: bool) -> int:
        """Return how many replicas of this rank's stages say True."""
        count = torch.tensor([int(flag)], dtype=torch.int64, device=self.comm_device)
        if self.replicas is not None:
            dist.all_reduce(count, group=self.replicas)
        return int(count)

    def first_replica_says(self, value: int) -> int:
        """Return what the first replica of this rank's stages passes."""
        said = torch.tensor([value if self.replica == 0 else 0], dtype=torch.int64, device=self.comm_device)
        if self.replicas is not None:
            dist.all_reduce(said, group=self.replicas)
        return int(said)

    def gather_over_replicas(self, values: Sequence[int]) -> list[list[int]]:
        """Return the `values`, equally many everywhere, of each replica's rank at this place of the pipeline."""
        if self.replicas is None:
            return [list(values)]
        own = torch.tensor(list(values), dtype=torch.int64, device=self.comm_device)
        parts = [torch.empty_like(own) for _ in range(self._num_replicas)]
        try:
            dist.all_gather(parts, own, group=self.replicas)
        except RuntimeError as error:
            raise PeerError(f"asking what the other replicas call: {error}") from error
        return [[int(value) for value in part.tolist()] for part in parts]

    def sum_over_world(self, tensor: Tensor) -> None:
        """Sum `tensor` over every rank, in place. Raises PeerError."""
        if self._world is None or dist.get_world_size(self._world) == 1:
            return
        if self.replicas is None and tensor.device.type == "cpu":
            self._sum_over_pipeline(tensor)
            return
        try:
            dist.all_reduce(tensor, group=self._world)
        except RuntimeError as error:
            raise PeerError(f"exchange of the step's status: {error}") from error

    def _sum_over_pipeline(self, tensor: Tensor) -> None:
        """Sum through pipeline rank 0, which adds up and answers: two messages instead of a collective, which takes
        ten times as long over shared memory. What rank 0 hears of a lost rank it tells the others.
        """
        packed = torch.cat([tensor, torch.full((1,), -1.0, dtype=tensor.dtype)])  # last: a rank that is lost
        others = range(1, len(self._members))
        if self.pipeline_rank:
            settle(self._transport.send([packed], 0, TAG_STATUS), 0)
            settle(self._transport.recv([packed], 0, TAG_STATUS), 0)
        else:
            parts = [torch.empty_like(packed) for _ in others]
            works = [self._transport.recv([part], peer, TAG_STATUS) for part, peer in zip(parts, others, strict=True)]
            for peer, work, part in zip(others, works, parts, strict=True):
                try:
                    settle(work, peer)
                    packed[:-1] += part[:-1]
                except PeerError:
                    packed[-1] = peer
            for peer in others:
                if peer != packed[-1]:
                    settle(self._transport.send([packed], peer, TAG_STATUS), peer)
        if packed[-1] >= 0:
            peer = int(packed[-1])
            raise PeerError(f"exchange of the step's status: pipeline rank {peer} is gone", peer_rank=peer)
        tensor.copy_(packed[:-1])

    def spread_over_replicas(self, value: int) -> int:
        """Return the largest minus the smallest `value` (below 2**62) over the replicas of this rank's stages."""
        ends = torch.tensor([value, -value], dtype=torch.int64, device=self.comm_device)
        if self.replicas is not None:
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.replicas)
        return int(ends[0] + ends[1])

    def agree(self, text: str = "", refusal: Exception | None = None) -> list[str]:
        """Return the `text` of every rank of the world, in rank order. Raises this rank's `refusal`, or another's as RemoteError."""
        words = json.dumps([text, "" if refusal is None else words_of(refusal)])
        said = [words] if self._world is None else exchange_text(words, self._world, self.comm_device)
        if refusal is not None:
            raise refusal
        answers = [json.loads(each) for each in said]
        for rank, (_, refused) in enumerate(answers):
            if refused:
                told = refused if refused.startswith(f"rank {rank} ") else f"rank {rank}: {refused}"
                raise RemoteError(told, rank=rank, stage=-1, chunk=-1, op="", traceback="")
        return [text for text, _ in answers]

    def replicas_that(self, flag: bool) -> list[bool]:
        """Return, on every rank, of each replica whether any of its ranks said True."""
        said = torch.zeros(self._num_replicas, dtype=torch.int64, device=self.comm_device)
        said[self.replica] = int(flag)
        if self._world is not None:
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._world)
        return [bool(value) for value in said.tolist()]

    def any_of_world(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank said True."""
        said = torch.tensor([int(flag)], dtype=torch.int64, device=self.comm_device)
        if self._world is not None:
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._world)
        return bool(said)

    def share_clock_base(self) -> int:
        """Return rank 0's clock, on every rank: times are sent relative to it."""
        base = torch.tensor(
            [monotonic_ns() if self.global_rank == 0 else 0], dtype=torch.int64, device=self.comm_device
        )
        if self._world is not None:
            dist.all_reduce(base, group=self._world)
        return int(base)

    def measure_clock(self) -> int:
        """Return this rank's clock minus pipeline rank 0's, in ns; the error is at most half the fastest round trip.

        Cristian's algorithm, rank after rank.
        """
        if self.pipeline is None:
            return 0
        peers = range(1, dist.get_world_size(self.pipeline)) if self.pipeline_rank == 0 else [0]
        best: tuple[int, int] | None = None
        for peer in peers:
            for _ in range(CLOCK_ROUNDS):
                if self.pipeline_rank == 0:
                    self._receive_int(peer)
                    self._send_int(monotonic_ns(), peer)
                else:
                    sent = monotonic_ns()
                    self._send_int(sent, 0)
                    theirs = self._receive_int(0)
                    received = monotonic_ns()
                    best = min(best or (received - sent, 0), (received - sent, (sent + received) // 2 - theirs))
        return best[1] if best else 0

    def _send_int(self, value: int, peer: int) -> None:
        tensor = torch.tensor([value], dtype=torch.int64, device=self.comm_device)
        settle(self._transport.send([tensor], peer, TAG_CLOCK), peer)

    def _receive_int(self, peer: int) -> int:
        tensor = torch.empty(1, dtype=torch.int64, device=self.comm_device)
        settle(self._transport.recv([tensor], peer, TAG_CLOCK), peer)
        return int(tensor)


def words_of(error: Exception) -> str:
    """Return an error as another rank quotes it: our own by their words, others with their type."""
    return str(error) if isinstance(error, StagekitError) else f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """What there is to close without shared memory."""


def _agree_on_numbers(world: dist.ProcessGroup, device: torch.device) -> None:
    """Have every rank of `world` number its next groups alike, and as none was before.

    Note [Names of groups]: torch names a group that only its members make after them and after the number of groups
    that the process has. Where two members have different numbers, each waits for ever under a name of its own; where
    a number comes again after a group was destroyed, members find the addresses of the old one in the store. So
    groups get numbers from here: the same on every rank, also one that a group leaves out, and each once.
    """
    global _number
    most = torch.tensor([max(_number, len(dist.distributed_c10d._world.pg_names))], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world)
    _number = int(most) + _SPARE_NUMBERS


def _next_number() -> int:
    global _number
    _number += 1
    return _number


def _numbered_group(members: Sequence[int]) -> dist.ProcessGroup:
    names: Any = dist.distributed_c10d._world.pg_names
    missing = _next_number() - len(names)
    if missing < 0:
        raise UserError(
            f"more than {_SPARE_NUMBERS} process groups were made while a pipeline is deployed; make them before"
        )
    others = [object() for _ in range(missing)]
    names.update(dict.fromkeys(others, ""))  # so many groups are there, for torch
    try:
        group = dist.new_group(list(members), use_local_synchronization=True)
    finally:
        for other in others:
            del names[other]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    """Have torch forget `groups`, which it does not by itself."""
    while groups:
        group = groups.pop()
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:  # else the whole world was destroyed
            dist.destroy_process_group(group)
