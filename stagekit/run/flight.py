"""What one rank's actions share: the parts that never change (`Wiring`) and what is under way in a step (`Flight`).

Transfers and outputs lie in slots numbered like the rank's list, so that nothing is looked up by name while a step
runs. Decides nothing. Used by stagekit.run.binding and what it binds; made by stagekit.run.executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from stagekit.plan.actions import Action, Op
from stagekit.run.inputs import InputExchange
from stagekit.run.layout import ChunkShapes, Placement
from stagekit.run.loss import LossRunner
from stagekit.run.stage import StageRunner
from stagekit.run.stats import Recorder
from stagekit.run.transport import Buffer, BufferPool, Transport, Work, settle

Received = tuple[tuple[Work, Buffer], ...]
Sent = tuple[tuple[Work, Tensor], ...]


class Reductions(Protocol):
    """What the executor asks of data parallelism and ties (stagekit.run.data_parallel)."""

    def entering(self, stage: int) -> Callable[[], None] | None:
        """Return what every rank calls before a step's first forward of `stage`, computed or not; None: nothing."""
        ...

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last of this step: launch a bucket when its gradients are complete."""
        ...

    def arm_for(self, stage: int, waiting: Collection[nn.Parameter]) -> Callable[[nn.Parameter], None] | None:
        """All gradients of `stage` are there but those of `waiting`; return what to call as each of them comes."""
        ...

    def launch_rest(self, stage: int) -> None:
        """That backward is over: launch the buckets that it did not complete, so that every rank's order is equal."""
        ...

    def abandon(self, stage: int) -> None:
        """The step failed: join the collectives that the last backward of `stage` would have launched."""
        ...

    def finish(self, stage: int, *, is_drained: bool = False) -> None:
        """Block until the gradients of `stage` are summed over its replicas."""
        ...

    def tie_sum(self, group: int, *, is_drained: bool = False) -> None:
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
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # of the last stage by chunk, when kept
    keep_output: bool = False


class Flight:
    """What is under way in a step."""

    step: Step
    shapes: Sequence[ChunkShapes]  # by chunk

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions
        self.peers: dict[int, int] = {}  # pipeline rank that each send goes to; filled when it is bound
        self.drop()

    def begin(self, step: Step) -> None:
        """Start `step`."""
        self.step = step
        self.shapes = [step.shapes[size] for size in step.chunk_sizes]

    def drop(self) -> None:
        """Forget everything under way."""
        self.received: list[Received] = [()] * self._num_actions  # by RECV, until the chunk is done with it
        self.sent: list[Sent] = [()] * self._num_actions  # by SEND, until reaped
        self.made: list[Sequence[Any]] = [()] * self._num_actions  # outputs by F, gradients by B, until sent
        self.values: dict[tuple[str, int, int], Tensor] = {}  # (value, target stage, chunk) between stages of this rank
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}  # (source stage, chunk), likewise

    def settle_sends(self) -> None:
        """Wait for the sends that no action reaped. Raises PeerError."""
        for index, peer in self.peers.items():
            for work, _ in self.sent[index]:
                settle(work, peer)
            self.sent[index] = ()


@dataclass(slots=True)
class Wiring:
    """The parts of one rank, and where things are in its list (asked at binding time only)."""

    placement: Placement
    recorder: Recorder
    runners: Mapping[int, StageRunner]
    transport: Transport
    inputs: InputExchange
    loss: LossRunner | None
    reductions: Reductions
    pool: BufferPool
    bytes: MutableMapping[tuple[int, str], int]  # (stage, direction), cumulative
    flight: Flight

    _found: dict[tuple[Op, int, int], list[tuple[int, int]]] = field(init=False)
    credits: dict[tuple[int, int], list[int]] = field(init=False)  # (stage, rank) → sends bound so far that use credits

    def __post_init__(self) -> None:
        self._found, self.credits = {}, {}
        for index, a in enumerate(self.recorder.actions):
            self._found.setdefault((a.op, a.stage, a.chunk), []).append((index, -1 if a.peer is None else a.peer))
        for found in self._found.values():
            found.sort(key=lambda pair: pair[1])

    def find(self, op: Op, stage: int, chunk: int) -> int | None:
        """Return where a compute action is in the list."""
        found = self._found.get((op, stage, chunk))
        return found[0][0] if found else None

    def gradient_maker(self, stage: int, chunk: int) -> int | None:
        """Return where the action is that makes the gradients of a chunk's inputs: B, or I where they come apart."""
        whole = self.find(Op.B, stage, chunk)
        return self.find(Op.I, stage, chunk) if whole is None else whole

    def transfers(self, op: Op, stage: int, chunk: int) -> list[tuple[int, int]]:
        """Return (index, peer stage) of a chunk's transfers of one kind, peers ascending."""
        return self._found.get((op, stage, chunk), [])

    def held(self, stage: int, chunk: int) -> tuple[int, ...]:
        """Return the receives whose buffers a chunk holds until nothing reads them."""
        return tuple(i for op in (Op.RECV_F, Op.RECV_B) for i, _ in self.transfers(op, stage, chunk))

    def is_here(self, stage: int) -> bool:
        """Say whether `stage` is on this rank."""
        return self.placement.stage_ranks[stage] == self.placement.rank

    def comes_back(self, send: Action) -> bool:
        """Say whether a SEND_F's gradient returns: the chunk's backward reaps it then."""
        assert send.peer is not None
        returns = bool(self.placement.edges_between(send.stage, send.peer, gradients=True))
        return returns and self.gradient_maker(send.stage, send.chunk) is not None
