"""The executor: one interpreter of a rank's frozen action list. It holds no schedule logic.

Per action a small method, bound once; the loop calls them in order. A receive only posts; its consumer waits. Sends of
activations are reaped when their gradient arrives, others hold SEND_CREDITS credits per channel.
Called by stagekit.run.runtime (one list per rank) and by stagekit.testing (all ranks in one thread).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Protocol

import torch
from torch import Tensor

from stagekit.errors import PeerError, StageError, UserError
from stagekit.plan.actions import COMPUTE, Action, Op
from stagekit.plan.contract import InputRef, SymbolRef, ValueRef
from stagekit.plan.seeds import chunk_base
from stagekit.plan.verify import SEND_CREDITS
from stagekit.run.inputs import InputExchange
from stagekit.run.layout import ChunkShapes, Placement
from stagekit.run.loss import LossRunner
from stagekit.run.stage import StageRunner
from stagekit.run.stats import Recorder
from stagekit.run.transport import BufferPool, Transport, wire_view

Buffer = tuple[Tensor, Tensor]
# The transfers of a compute action and their place around it.
_AROUND = {"F": {Op.RECV_F: 0, Op.F: 1, Op.SEND_F: 2}, "B": {Op.RECV_B: 0, Op.B: 1, Op.SEND_B: 2}}


class Reductions(Protocol):
    """What the executor asks of data parallelism and ties (stagekit.run.data_parallel)."""

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last of this step: launch a bucket when its gradients are complete."""
        ...

    def finish(self, stage: int) -> None:
        """Block until the gradients of `stage` are summed over its replicas."""
        ...

    def tie_sum(self, group: int) -> None:
        """Block until the gradients of tie group number `group` are summed over its stages."""
        ...


@dataclass(slots=True)
class Step:
    """What one step is about."""

    number: int
    seed: int
    replica: int
    chunk_sizes: tuple[int, ...]
    shapes: Mapping[int, ChunkShapes]  # by chunk size
    train: bool = True
    outputs: list[dict[str, Tensor]] = field(default_factory=list)  # of the last stage, when kept
    keep_output: bool = False


class Executor:
    """One rank's stages, buffers and list. One thread; `run` is not reentrant."""

    def __init__(
        self,
        placement: Placement,
        actions: Sequence[Action],
        runners: Mapping[int, StageRunner],
        transport: Transport,
        inputs: InputExchange,
        loss: LossRunner | None,
        reductions: Reductions,
        device: torch.device,
    ) -> None:
        self._placement, self._runners, self._transport = placement, runners, transport
        self._inputs, self._loss, self._reductions = inputs, loss, reductions
        self.recorder = Recorder(actions)
        self.pool = BufferPool(device)
        self.bytes: defaultdict[tuple[int, str], int] = defaultdict(int)  # (stage, direction), cumulative
        self._calls = [self._bind(index, action) for index, action in enumerate(self.recorder.actions)]
        self._last_chunk = {
            stage: max((a.chunk for a in actions if a.op is Op.B and a.stage == stage), default=-1) for stage in runners
        }
        self._reset()

    def _reset(self) -> None:
        self._received: dict[tuple[Op, int, int, int], list[tuple[str, Any, Buffer]]] = {}
        self._held: dict[tuple[int, int], list[Buffer]] = defaultdict(list)  # read until (stage, chunk)'s backward
        self._local: dict[tuple[str, int, int], Tensor] = {}  # (value, target stage, chunk)
        self._made: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._gradients: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)  # for (stage, chunk)'s backward
        self._returned: dict[tuple[int, int], dict[str, Tensor | None]] = {}
        self._sent_forward: dict[tuple[int, int, int], list[tuple[Any, Tensor]]] = {}
        self._sent: dict[tuple[int, int], deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)

    # ---- running

    def begin(self, step: Step) -> None:
        """Prepare for `step`. The inputs were handed to the InputExchange."""
        self.step = step
        self._performed = 0
        self.recorder.begin_step()

    def run_list(self) -> None:
        """Run the whole list. Raises StageError or PeerError."""
        for index in range(len(self._calls)):
            self.perform(index)

    def perform_chunk(self, op: str, stage: int, chunk: int) -> None:
        """Run one compute action of the list by hand, its receives before it and its sends after it.

        Input transfers run before the first, reductions after the last compute action. Raises UserError for an
        action that is not in the list.
        """
        actions = self.recorder.actions
        wanted = [i for i, a in enumerate(actions) if a.stage == stage and a.chunk == chunk and a.op.endswith(op)]
        wanted = [i for i in wanted if actions[i].op in _AROUND[op]]
        if not wanted:
            raise UserError(f"rank {self._placement.rank} has no {stage}{op}{chunk}")
        if not self._performed:
            wanted = [i for i, a in enumerate(actions) if a.op in (Op.SEND_X, Op.RECV_X)] + wanted
        for index in sorted(wanted, key=lambda i: _AROUND[op].get(actions[i].op, -1)):
            self.perform(index)
            self._performed += actions[index].op in COMPUTE
        if self._performed == sum(action.op in COMPUTE for action in actions):
            for index, action in enumerate(actions):
                if action.op in (Op.REDUCE, Op.TIE_SUM):
                    self.perform(index)

    def perform(self, index: int) -> None:
        """Run action number `index`."""
        try:
            self._calls[index]()
        except PeerError:
            self.abort()
            raise
        except Exception as error:
            self.abort()
            action = self.recorder.actions[index]
            raise StageError(
                f"rank {self._placement.rank}, stage {action.stage}, chunk {action.chunk}, {action.op}: "
                f"{type(error).__name__}: {error}",
                rank=self._placement.rank,
                stage=action.stage,
                chunk=action.chunk,
                op=action.op,
            ) from error

    def finish(self) -> None:
        """Wait for every send of the step."""
        for sent in self._sent_forward.values():
            self._reap(sent, -1)
        self._sent_forward.clear()
        for (_, peer), queue in self._sent.items():
            while queue:
                self._reap(queue.popleft(), peer)
        self._inputs.finish()

    def abort(self) -> None:
        """Forget the step after an error; buffers that a transfer may still write are not reused."""
        self._reset()
        for runner in self._runners.values():
            runner.drop_all()

    # ---- binding

    def _bind(self, index: int, action: Action) -> Callable[[], None]:
        stage, chunk, peer = action.stage, action.chunk, action.peer
        match action.op:
            case Op.F:
                return lambda: self._forward(index, stage, chunk)
            case Op.B:
                return lambda: self._backward(index, stage, chunk)
            case Op.REDUCE:
                return self._timed(index, lambda: self._reductions.finish(stage))
            case Op.TIE_SUM:
                return self._timed(index, lambda: self._reductions.tie_sum(chunk))
        assert peer is not None
        match action.op:
            case Op.SEND_F:
                return self._timed(index, self._bind_send_forward(stage, chunk, peer))
            case Op.SEND_B:
                return self._timed(index, self._bind_send_backward(stage, chunk, peer))
            case Op.RECV_F | Op.RECV_B:
                return self._timed(index, self._bind_receive(action.op, stage, chunk, peer))
            case Op.SEND_X:
                return self._timed(index, lambda: self._inputs.send(peer))
            case _:
                return self._timed(index, lambda: self._inputs.receive(peer, stage))

    def _timed(self, index: int, call: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            self.recorder.start_ns[index] = monotonic_ns()
            call()
            self.recorder.end_ns[index] = monotonic_ns()

        return timed

    # ---- compute

    def _forward(self, index: int, stage: int, chunk: int) -> None:
        step, runner = self.step, self._runners[stage]
        waiting = monotonic_ns()
        arguments = self._arguments(stage, chunk)
        is_last = stage == self._placement.last_stage
        if is_last and self._loss is not None:
            self._loss.prepare(step.chunk_sizes)
        start = monotonic_ns()
        base = chunk_base(step.seed, step.number, chunk, step.replica)
        outputs = runner.forward(chunk, arguments, base, train=step.train)
        if is_last:
            if self._loss is not None:
                self._loss.forward(chunk, outputs, base, step.train)
            if step.keep_output:
                step.outputs.append({value: tensor.detach() for value, tensor in outputs.items()})
        self._keep_outputs(stage, chunk, outputs)
        if not step.train:
            self._release(stage, chunk)
        recorder = self.recorder
        recorder.wait_ns[index], recorder.start_ns[index] = start - waiting, start
        recorder.end_ns[index] = monotonic_ns()

    def _arguments(self, stage: int, chunk: int) -> list[Any]:
        values: dict[str, Tensor] = {}
        for source in self._sources(stage):
            key = (Op.RECV_F, stage, chunk, source)
            for value, work, buffer in self._received.pop(key, ()):
                self._transport.wait(work, self._placement.stage_ranks[source])
                values[value] = buffer[0]
                self._held[stage, chunk].append(buffer)
        size = self.step.chunk_sizes[chunk]
        arguments: list[Any] = []
        for ref in self._runners[stage].spec.inputs:
            match ref:
                case ValueRef(value):
                    arguments.append(values[value] if value in values else self._local.pop((value, stage, chunk)))
                case InputRef(number):
                    arguments.append(self._inputs.chunk(number, chunk, self.step.chunk_sizes))
                case SymbolRef(symbol):
                    arguments.append(self.step.shapes[size].symbols[symbol])
        return arguments

    def _sources(self, stage: int) -> list[int]:
        return sorted({edge.source for edge in self._placement.spec.edges if stage in edge.targets})

    def _keep_outputs(self, stage: int, chunk: int, outputs: dict[str, Tensor]) -> None:
        ranks, remote = self._placement.stage_ranks, False
        for edge in self._placement.spec.edges:
            if edge.source == stage:
                for target in edge.targets:
                    if ranks[target] == self._placement.rank:
                        self._local[edge.value, target, chunk] = outputs[edge.value].detach()
                    else:
                        remote = True
        if remote:
            self._made[stage, chunk] = outputs

    def _backward(self, index: int, stage: int, chunk: int) -> None:
        waiting = monotonic_ns()
        gradients = self._collect_gradients(stage, chunk)
        is_last = stage == self._placement.last_stage
        scale = self._loss.scale(chunk) if is_last and self._loss is not None else None
        if chunk == self._last_chunk[stage]:
            self._reductions.arm(stage)
        start = monotonic_ns()
        runner = self._runners[stage]
        if is_last and self._loss is not None:
            returned = runner.backward_from(chunk, self._loss.pop(chunk), scale)
        else:
            returned = runner.backward(chunk, gradients)
        end = monotonic_ns()
        del gradients
        self._release(stage, chunk)
        self._deliver(stage, chunk, returned)
        recorder = self.recorder
        recorder.wait_ns[index], recorder.start_ns[index], recorder.end_ns[index] = start - waiting, start, end

    def _collect_gradients(self, stage: int, chunk: int) -> dict[str, Tensor | None]:
        """Sum what each target stage returned, in the order of the targets."""
        placement = self._placement
        total: dict[str, Tensor | None] = dict(self._gradients.pop((stage, chunk), {}))
        for target in range(stage + 1, len(placement.stage_ranks)):
            for value, work, buffer in self._received.pop((Op.RECV_B, stage, chunk, target), ()):
                self._transport.wait(work, placement.stage_ranks[target])
                self._held[stage, chunk].append(buffer)
                seen = total.get(value)
                total[value] = buffer[0] if seen is None else seen + buffer[0]
            if (sent := self._sent_forward.pop((stage, target, chunk), None)) is not None:
                self._reap(sent, placement.stage_ranks[target])
        return total

    def _deliver(self, stage: int, chunk: int, returned: dict[str, Tensor | None]) -> None:
        """Hand the gradients of received values to their makers: at once on this rank, else at SEND_B."""
        ranks = self._placement.stage_ranks
        for source in self._sources(stage):
            if ranks[source] != self._placement.rank:
                self._returned[stage, chunk] = returned
                continue
            inbox = self._gradients[source, chunk]
            for edge in self._placement.edges_between(source, stage, gradients=True):
                gradient = returned[edge.value]
                if gradient is not None:
                    inbox[edge.value] = inbox[edge.value] + gradient if edge.value in inbox else gradient

    def _release(self, stage: int, chunk: int) -> None:
        for buffer in self._held.pop((stage, chunk), ()):
            self.pool.give(buffer)

    # ---- transfers

    def _bind_receive(self, op: Op, stage: int, chunk: int, peer: int) -> Callable[[], None]:
        gradients = op is Op.RECV_B
        source, target = (stage, peer) if gradients else (peer, stage)
        values = [
            (edge.value, self._placement.tag(source, target, chunk, number, gradients=gradients))
            for number, edge in enumerate(self._placement.edges_between(source, target, gradients=gradients))
        ]
        peer_rank = self._placement.stage_ranks[peer]
        direction = "recv_backward" if gradients else "recv_forward"

        def receive() -> None:
            shapes = self.step.shapes[self.step.chunk_sizes[chunk]]
            posted = []
            for value, tag in values:
                buffer = self.pool.take(*shapes.edge(value))
                posted.append((value, self._transport.post_recv(buffer[1], peer_rank, tag), buffer))
                self.bytes[stage, direction] += buffer[1].nbytes
            self._received[op, stage, chunk, peer] = posted

        return receive

    def _bind_send_forward(self, stage: int, chunk: int, peer: int) -> Callable[[], None]:
        edges = self._placement.edges_between(stage, peer)
        tags = [self._placement.tag(stage, peer, chunk, n, gradients=False) for n in range(len(edges))]
        peer_rank = self._placement.stage_ranks[peer]
        remote = [
            target
            for target in range(len(self._placement.stage_ranks))
            if self._placement.stage_ranks[target] != self._placement.rank
            and self._placement.edges_between(stage, target)
        ]
        frees = peer == remote[-1]
        reaped_later = bool(self._placement.edges_between(stage, peer, gradients=True))

        def send() -> None:
            made = self._made.pop((stage, chunk)) if frees else self._made[stage, chunk]
            shapes = self.step.shapes[self.step.chunk_sizes[chunk]]
            sent = []
            for edge, tag in zip(edges, tags, strict=True):
                wire = _dense(made[edge.value].detach(), shapes.edge(edge.value)[1])
                sent.append((self._transport.post_send(wire, peer_rank, tag), wire))
                self.bytes[stage, "send_forward"] += wire.nbytes
            if reaped_later and self.step.train:
                self._sent_forward[stage, peer, chunk] = sent
            else:
                self._credit(stage, peer_rank, sent)

        return send

    def _bind_send_backward(self, stage: int, chunk: int, peer: int) -> Callable[[], None]:
        edges = self._placement.edges_between(peer, stage, gradients=True)
        tags = [self._placement.tag(peer, stage, chunk, n, gradients=True) for n in range(len(edges))]
        ranks = self._placement.stage_ranks
        peer_rank = ranks[peer]
        remote = [source for source in self._sources(stage) if ranks[source] != self._placement.rank]
        remote = [source for source in remote if self._placement.edges_between(source, stage, gradients=True)]
        frees = peer == remote[-1]

        def send() -> None:
            returned = self._returned.pop((stage, chunk)) if frees else self._returned[stage, chunk]
            shapes = self.step.shapes[self.step.chunk_sizes[chunk]]
            sent = []
            for edge, tag in zip(edges, tags, strict=True):
                shape, stride, dtype = shapes.edge(edge.value)
                gradient = returned[edge.value]
                if gradient is None:
                    gradient = torch.zeros(shape, dtype=dtype, device=self._inputs.device)
                wire = _dense(gradient, stride)
                sent.append((self._transport.post_send(wire, peer_rank, tag), wire))
                self.bytes[stage, "send_backward"] += wire.nbytes
            self._credit(stage, peer_rank, sent)

        return send

    def _credit(self, stage: int, peer_rank: int, sent: list[tuple[Any, Tensor]]) -> None:
        queue = self._sent[stage, peer_rank]
        queue.append(sent)
        if len(queue) > SEND_CREDITS:
            self._reap(queue.popleft(), peer_rank)

    def _reap(self, sent: list[tuple[Any, Tensor]], peer_rank: int) -> None:
        for work, _ in sent:
            self._transport.wait(work, peer_rank)


def _dense(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the storage of `tensor` in the agreed layout as a flat tensor, copying where the layout differs."""
    if tensor.stride() == stride:
        return wire_view(tensor)
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor)
    return wire_view(copy)
