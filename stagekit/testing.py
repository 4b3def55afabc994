"""Public fakes and harnesses: run a pipeline in one process, or in real ones.

`run_local` walks the verified order of all ranks in one thread over an in-process transport: no process group, no
deadlock, replayable. `spawn` starts real processes with a gloo group.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import pickle
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagekit.errors import BugError, PeerError, RemoteError, StagekitError, UserError
from stagekit.plan.contract import (
    Bucket,
    Edge,
    GraphInput,
    InputRef,
    ModelSpec,
    OutputSpec,
    ParameterSpec,
    StageInput,
    StageSpec,
    Symbol,
    TensorSpec,
    ValueRef,
)
from stagekit.run.local import LocalRun
from stagekit.run.transport import Work

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from stagekit.api import Pipeline  # capturing is slow to import, and only `run_local` takes a pipeline

    PipeEnd = Connection[Any, Any]

T = TypeVar("T")

_PRELOADED = ("torch", "stagekit.api", "stagekit.testing")  # by the process that those of `spawn` are forked from


class InProcessTransport:
    """A pipeline rank's end of a shared mailbox; sends copy at once, so a sender may reuse its tensor."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self._rank, self._mailbox = rank, mailbox

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        self._mailbox.messages[self._rank, peer, tag].append(tensors[0].detach().clone())
        return Delivery(self._mailbox, None, (self._rank, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        return Delivery(self._mailbox, tensors[0], (peer, self._rank, tag))


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message in the mailbox; a receiver's (with a `buffer`) takes it out when it waits."""

    mailbox: Mailbox
    buffer: Tensor | None
    key: tuple[int, int, int]

    def is_completed(self) -> bool:
        """Say whether it was taken out."""
        return self.buffer is None

    def wait(self) -> None:
        """Copy the message into the buffer. Raises BugError if nothing was sent yet."""
        if self.buffer is None:
            return
        if not self.mailbox.messages[self.key]:
            raise BugError(f"nothing was sent for {self.key}: the order is not a linear extension")
        self.buffer.copy_(self.mailbox.messages[self.key].popleft())


@dataclass(slots=True)
class Mailbox:
    """Messages in flight by (from, to, tag)."""

    messages: defaultdict[tuple[int, int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What a step gave: the loss, the merged output, gradients and buffers by their names in the unsplit model."""

    loss: float
    output: Any
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_local(pipe: Pipeline, *args: Any, target: Any = None, **kwargs: Any) -> LocalResult:
    """Run one training step of all ranks in this process. Raises UserError for replicas: use `spawn` for those."""
    if pipe.plan.replicas != 1:
        raise UserError(f"run_local runs one replica, the plan has {pipe.plan.replicas}; use spawn")
    mailbox = Mailbox()
    run = LocalRun(pipe.source, pipe.plan, pipe.options, lambda rank: InProcessTransport(rank, mailbox))
    loss, output = run.step(args, kwargs, target)
    return LocalResult(loss, output, run.gradients(), run.buffers())


class ChainSource:
    """A pipeline made by hand: one module per stage, each [rows, …] → [rows, …] of a fixed width; nothing is captured.

    For benchmarks and tests of the runtime alone. `width` is the size of every edge, `chunk_rows` the example's rows.
    """

    def __init__(self, modules: Sequence[nn.Module], width: int, chunk_rows: int) -> None:
        self._modules = list(modules)
        spec = TensorSpec(("rows", width), (width, 1), "float32")
        edges = tuple(
            Edge(f"v{i}", i, (i + 1,), dataclasses.replace(spec, requires_grad=True)) for i in range(len(modules) - 1)
        )
        stages = tuple(self._stage(index, module) for index, module in enumerate(modules))
        self.spec = ModelSpec(
            inputs=(GraphInput("args[0]", spec, 0),),
            symbols=(Symbol("rows", chunk_rows, 1, None, 0, 0, True),),
            stages=stages,
            edges=edges,
            outputs=(OutputSpec(f"v{len(modules) - 1}", spec, 0),),
            aliases=(),
            graph_hash=f"chain of {len(modules)}",
            self_check="none (made by hand)",
            split_report="",
        )

    @staticmethod
    def _stage(index: int, module: nn.Module) -> StageSpec:
        parameters = tuple(
            ParameterSpec(f"{index}.{name}", tuple(p.shape), "float32", p.requires_grad, p.numel() * 4)
            for name, p in module.named_parameters()
        )
        inputs: tuple[StageInput, ...] = (InputRef(0) if index == 0 else ValueRef(f"v{index - 1}"),)
        bucket = Bucket(sum(p.size_bytes for p in parameters), tuple(p.name for p in parameters))
        return StageSpec(
            index, str(index), str(index), inputs, (f"v{index}",), parameters, (), (bucket,) if parameters else ()
        )

    def stage_module(self, index: int, *, device: torch.device) -> nn.Module:
        """Return a copy of that module, its parameters named "<stage>.<name>"."""
        return _ChainStage(index, copy.deepcopy(self._modules[index])).to(device)

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        return list(args)

    def unflatten_output(self, leaves: list[Any]) -> Any:
        return leaves[0]


class _ChainStage(nn.Module):
    draws = False  # a chain's modules must not

    def __init__(self, index: int, module: nn.Module) -> None:
        super().__init__()
        self._name = str(index)
        self.add_module(self._name, module)

    def set_seed_base(self, base: int) -> None:
        """Nothing in it draws."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self._modules[self._name](x),)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class _Ended:
    """How one child of `spawn` ended."""

    ok: bool
    value: Any  # the result, or the traceback
    when: float  # on the monotonic clock; infinite for a rank that failed because of another


def spawn(fn: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[T]:
    """Run `fn(rank, *args)` in `world_size` real processes with an initialised gloo group; results in rank order.

    `fn` must be importable (a module's function). Raises StagekitError with the traceback of the rank that failed
    first; the others are ended, so that none is left behind. They are forked from one that has imported torch and
    stagekit and done nothing else, and ends with this process; each has this one's environment as it is now.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    environment = dict(os.environ)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ends: list[PipeEnd] = []
    processes = []
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            given = (there, environment, fn, rank, world_size, store.port, args)
            process = context.Process(target=_child, args=given, daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        return _collect(ends, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for end in ends:
            end.close()


def _collect(ends: Sequence[PipeEnd], timeout_s: float) -> list[Any]:
    ended: dict[int, _Ended] = {}
    deadline = monotonic() + timeout_s
    while len(ended) < len(ends) and all(e.ok for e in ended.values()):
        fresh = _receive(ends, ended, max(0.0, deadline - monotonic()))
        if not fresh:
            missing = sorted(set(range(len(ends))) - set(ended))
            raise StagekitError(f"ranks {missing} did not end within {timeout_s:.0f} s")
        ended |= fresh
    if not all(e.ok for e in ended.values()):
        ended |= _receive(ends, ended, 1.0)  # a rank that failed earlier may be heard later
        rank = min((r for r, e in ended.items() if not e.ok), key=lambda r: ended[r].when)
        raise StagekitError(f"rank {rank} failed:\n{ended[rank].value}")
    return [ended[rank].value for rank in range(len(ends))]


def _receive(ends: Sequence[PipeEnd], ended: Mapping[int, _Ended], timeout_s: float) -> dict[int, _Ended]:
    waiting = {end: rank for rank, end in enumerate(ends) if rank not in ended}
    fresh: dict[int, _Ended] = {}
    ready = wait(list(waiting), timeout=timeout_s)
    for end, rank in waiting.items():
        if end in ready:
            try:
                fresh[rank] = _Ended(*pickle.loads(end.recv_bytes()))
            except EOFError:
                fresh[rank] = _Ended(False, "the process died without a word", float("inf"))
    return fresh


def _child(
    end: PipeEnd,
    environment: dict[str, str],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result = fn(rank, *args)
        dist.barrier()
        end.send_bytes(pickle.dumps((True, result, monotonic())))  # by value: the child may be gone first
    except BaseException as error:
        is_victim = isinstance(error, RemoteError | PeerError)
        when = float("inf") if is_victim else monotonic()
        end.send_bytes(pickle.dumps((False, traceback.format_exc(), when)))
        os._exit(1)
    finally:
        end.close()
    dist.destroy_process_group()
