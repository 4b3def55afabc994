"""Gradients over replicas and ties, bucket by bucket.

A reducer is armed for a stage's last chunk only: hooks count each bucket's gradients down as that backward makes them
(its weight half: the stage does, weight by weight), and a complete bucket's all-reduce is launched at once, strictly in
bucket order, so that every rank has the same order of collectives. The compiled submodule of the next bucket computes
meanwhile.

Note [Frozen]: a parameter that a caller froze after deploy has no gradient and gets none; its place in a bucket carries
zeros. What is summed last says of each parameter whether it is frozen: where it still trains, a replica that froze it is
an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stagekit.errors import BugError, PeerError, UserError
from stagekit.plan.contract import StageSpec
from stagekit.run.stats import Recorder

COMPRESSIONS = {"bf16": torch.bfloat16}  # what gradients may be rounded to on their way


class Reducer:
    """Sums one stage's gradients over its replicas, once per step. A step may fail: then `drop` ends it, not `finish`.

    `always`: in steps without synchronisation, too.
    """

    always = False

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.recorder: Recorder | None = None

    def begin(self) -> None:
        """A step begins: keep what earlier ones left anywhere but in the parameters' gradients, in case it fails."""

    def check_trained(self) -> None:
        """As a step begins, after `begin`: raise UserError where what trains can't be summed."""

    def arm(self) -> None:
        """The next backward is the stage's last of the step."""

    def arm_for(self, waiting: Collection[nn.Parameter]) -> Callable[[nn.Parameter], None]:
        """All gradients are there but those of `waiting`; return what is called as each of them comes."""
        raise BugError(f"the backward of stage {self._stage} is not halved")

    def launch_rest(self) -> None:
        """The last backward is over: launch what it left, at this point of the list on every rank alike."""
        raise BugError(f"{type(self).__name__} does not say how it sums")

    def abandon(self) -> None:
        """The step failed: join what the other replicas wait for."""
        self.launch_rest()

    def finish(self) -> None:
        """Block until the sums are in the parameters' gradients."""

    def check(self) -> None:
        """After `finish`: raise UserError where replicas summed what does not belong together."""

    def drop(self) -> None:
        """Forget what a failed step left anywhere but in the parameters' gradients: there it is as `begin` found it."""


class Unhalved(Reducer):
    """A reducer of a stage whose backward is never halved, all done once the last one is over.

    Its replicas exchange something before a step's first forward too: at that place of the list on every rank, also where
    that forward is not computed (Note [Order] in stagekit.run.wrapped).
    """

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._has_entered = False

    def begin(self) -> None:
        """A step begins."""
        self._has_entered = False

    def enter(self) -> None:
        """Exchange, unless this step did, what the stage's forwards need."""
        if self._has_entered:
            return
        self._has_entered = True
        try:
            self._gather()
        except RuntimeError as error:
            raise PeerError(f"before the first forward of stage {self._stage}: {error}") from error

    def _gather(self) -> None:
        """Nothing to exchange."""

    def note(self, started_ns: int) -> None:
        """Record a sum that began then and is over."""
        if self.recorder is not None:
            self.recorder.reduce.append((self._stage, 0, started_ns, monotonic_ns()))


class BucketReducer(Reducer):
    """Sums one stage's gradients over its replicas. Gradients of earlier steps are set aside and added afterwards."""

    def __init__(
        self,
        spec: StageSpec,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        compress: str = "",
    ) -> None:
        """`compress`: a name of COMPRESSIONS, to which each replica's gradient is rounded; empty: none is."""
        super().__init__(spec.index)
        self._group = group
        self._sent_as = COMPRESSIONS.get(compress)
        self._buckets = [[parameters[name] for name in bucket.parameters] for bucket in spec.buckets]
        self._names = [name for bucket in spec.buckets for name in bucket.parameters]
        self._armed = False
        self._flying: list[tuple[Any, Tensor, int]] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        reducer = weakref.ref(self)  # an optimizer may keep the parameters longer than the run and its group

        def ready(_: Tensor) -> None:
            this = reducer()
            if this is not None and this._armed:
                this._missing[number] -= 1
                this._launch_complete()

        return ready

    def arm(self) -> None:
        """The next backward is this stage's last of the step."""
        self._armed = True
        self._missing = [sum(parameter.requires_grad for parameter in bucket) for bucket in self._buckets]
        self._flying = []

    @property
    def num_launched(self) -> int:
        """Buckets whose all-reduce is on its way or over, in this step."""
        return len(self._flying)

    def arm_for(self, waiting: Collection[nn.Parameter]) -> Callable[[nn.Parameter], None]:
        """All gradients are there but those of `waiting`; return what is called as each of them comes.

        Buckets without one of them are launched at once.
        """
        left = {id(parameter) for parameter in waiting}
        places = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket if id(p) in left}
        self.arm()
        self._missing = [sum(id(parameter) in left for parameter in bucket) for bucket in self._buckets]
        self._launch_complete()

        def ready(parameter: nn.Parameter) -> None:
            self._missing[places[id(parameter)]] -= 1
            self._launch_complete()

        return ready

    def _launch_complete(self) -> None:
        while len(self._flying) < len(self._buckets) and self._missing[len(self._flying)] <= 0:
            self._launch(self._buckets[len(self._flying)])

    def _launch(self, bucket: Sequence[nn.Parameter]) -> None:
        parts = []
        for parameter in bucket:
            gradient = parameter.grad
            if gradient is None:  # unused in every chunk: zero, as on the replicas that did use it
                gradient = torch.zeros_like(parameter)
                if parameter.requires_grad:
                    parameter.grad = gradient
            parts.append(gradient.reshape(-1))
        if len(self._flying) == len(self._buckets) - 1:
            frozen = [float(not parameter.requires_grad) for bucket in self._buckets for parameter in bucket]
            parts.append(parts[0].new_tensor(frozen))  # Note [Frozen]
        flat = torch.cat(parts)
        if self._sent_as is not None and flat.is_floating_point():
            flat = flat.to(self._sent_as)
        started = monotonic_ns()
        self._flying.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, started))

    def launch_rest(self) -> None:
        """Launch what the last backward left: unused parameters, or a chunk that weighed nothing on this replica alone.

        At this point of the list on every rank, or the order of collectives would differ between replicas.
        """
        self._armed = False
        while len(self._flying) < len(self._buckets):
            self._launch(self._buckets[len(self._flying)])

    def abandon(self) -> None:
        """Launch every bucket that is not launched yet, whatever it holds: the other replicas wait for it."""
        if not self._armed:
            self.arm()
        self.launch_rest()

    def finish(self) -> None:
        """Block until every bucket is summed, and write the sums into the parameters' gradients."""
        waited = 0
        for number, (bucket, (work, flat, started)) in enumerate(zip(self._buckets, self._flying, strict=True)):
            begun = monotonic_ns()
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(f"gradient all-reduce of stage {self._stage}: {error}") from error
            ended = monotonic_ns()
            waited += ended - begun
            if self.recorder is not None:
                self.recorder.reduce.append((self._stage, number, started, ended))
                self.recorder.reduce_wait_ns[self._stage] = waited
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, part in zip(bucket, torch.split(flat[: sum(sizes)], sizes), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter.grad))

    def check(self) -> None:
        """Raise UserError for a parameter that trains here and not on all replicas."""
        parameters = (parameter for bucket in self._buckets for parameter in bucket)
        frozen = self._flying[-1][1][-len(self._names) :].tolist()
        for name, parameter, elsewhere in zip(self._names, parameters, frozen, strict=True):
            if elsewhere and parameter.requires_grad:
                raise UserError(
                    f"{name} (stage {self._stage}) was frozen on some replicas and trains on others, whose weights would no "
                    "longer be equal; call requires_grad_ on every replica alike"
                )


def is_frozen(parameter: nn.Parameter) -> bool:
    """Say whether a parameter takes no part in a sum: it does not train, and no earlier step left it a gradient."""
    return not parameter.requires_grad and parameter.grad is None


class TieGroup:
    """Copies of the same weights on several stages: their gradients are summed, on this rank and over ranks."""

    def __init__(self, copies: Mapping[str, Sequence[nn.Parameter]], group: dist.ProcessGroup | None) -> None:
        """`copies`: per weight those on this rank."""
        self._copies, self._group = copies, group
        self._is_over = False

    def begin(self) -> None:
        """A step begins."""
        self._is_over = False

    def finish(self) -> None:
        """Block until every copy's gradient is the sum over all copies, unless it is. Raises PeerError, and at last UserError
        where only some copies of a weight are frozen.
        """
        if self._is_over:
            return
        mixed = [name for name, copies in self._copies.items() if self._is_mixed(copies)]
        self._is_over = True
        if mixed:
            raise UserError(
                f"{mixed[0]} is tied over stages, and only some of its copies were frozen; freeze all or none"
            )

    def _is_mixed(self, copies: Sequence[nn.Parameter]) -> bool:
        """Sum one weight's gradients; say whether some copies are frozen, and some of this rank not."""
        first = copies[0]
        total = torch.zeros(first.numel() + 1, dtype=first.dtype, device=first.device)
        for copy in copies:
            if copy.grad is not None:
                total[:-1] += whole(copy.grad).reshape(-1)
        total[-1] = float(not all(copy.requires_grad for copy in copies))  # Note [Frozen]
        if self._group is not None:
            try:
                dist.all_reduce(total, group=self._group)
            except RuntimeError as error:
                raise PeerError(f"gradient sum of a tied weight: {error}") from error
        for copy in copies:
            if not is_frozen(copy):
                copy.grad = like(total[:-1].view(copy.shape).clone(), copy)
        return bool(total[-1]) and any(copy.requires_grad for copy in copies)


def whole(value: Tensor) -> Tensor:
    """Return a sharded tensor whole, on every replica; any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, shard: Tensor) -> Tensor:
    """Return a whole tensor, the same on every replica, sharded as `shard` is, if it is."""
    return distribute_tensor(value, shard.device_mesh, shard.placements) if isinstance(shard, DTensor) else value


class GradientSums:
    """All reductions of one rank, and the gradients that earlier steps left."""

    def __init__(
        self,
        reducers: Mapping[int, Reducer],
        ties: Mapping[int, TieGroup],
        trained: Sequence[tuple[str, nn.Parameter]],
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """`frozen`: parameters of a pipeline made without their gradients."""
        self._frozen = tuple(frozen)
        self._reducers, self._ties = dict(reducers), dict(ties)
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._trained: list[bool] = []  # which of them did in the last step
        self._sums = bool(reducers or ties)  # something is summed over ranks: only what was not summed before may be
        self._now = True  # whether the step that runs sums
        self._is_due = False  # `.grad` holds what earlier steps did not sum
        self._earlier: list[Tensor | None] | None = None  # as the step found them; none runs: None

    def attach(self, recorder: Recorder) -> None:
        """Let every reducer record its launches."""
        for reducer in self._reducers.values():
            reducer.recorder = recorder

    @property
    def synchronises(self) -> bool:
        """Whether the next step's gradients are summed over ranks."""
        return self._now

    @contextmanager
    def synchronised(self, now: bool) -> Iterator[None]:
        """Steps inside sum, or leave each rank its own gradients; the next step that sums adds those to its own."""
        before, self._now = self._now, now
        try:
            yield
        finally:
            self._now = before

    def begin(self) -> None:
        """Keep what `.grad` holds, in case the step fails; set it aside where it is summed already.

        Raises UserError where what is summed and what is not would end in one gradient, and for a parameter that began to
        train: no stage sends what its gradient needs.
        """
        for reducer in self._reducers.values():
            reducer.begin()
        for tie in self._ties.values():
            tie.begin()
        held = [parameter.grad for parameter in self._parameters]
        if all(grad is None for grad in held):
            self._is_due = False  # zeroed meanwhile
        if self._sets_aside:
            self._earlier = held
            for parameter in self._parameters:
                parameter.grad = None
            self._check_trained()
            return
        self._earlier = [None if grad is None else grad.clone() for grad in held]
        if self._sums and not self._is_due and any(grad is not None and bool(grad.any()) for grad in held):
            raise UserError(
                "a step without synchronisation would add to gradients that are summed over replicas or tied stages already, "
                "which would be summed again; zero the gradients first"
            )
        self._check_trained()

    def _which_train(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _check_trained(self) -> None:
        training = self._which_train()
        if self._is_due and training != self._trained:
            pairs = zip(self._names, self._trained, training, strict=True)
            name = next(name for name, trained, trains in pairs if trained is not trains)
            raise UserError(
                f"{name} was frozen or thawed between steps whose gradients are summed together, of which replicas must hold the "
                "same; call requires_grad_ before the first step inside of no_sync, or after the step that sums"
            )
        for reducer in self._reducers.values():
            reducer.check_trained()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UserError(
                    f"{name} was frozen when the model was captured, and now requires grad; make the pipeline with it "
                    "training, and freeze it after deploy"
                )

    @property
    def _sets_aside(self) -> bool:
        return self._sums and self._now and not self._is_due

    def abort(self) -> None:
        """After a failed step: drop its gradients, the earlier ones are as before."""
        if self._earlier is None:
            return  # undone already
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier
        for reducer in self._reducers.values():
            reducer.drop()
        self._earlier = None

    def end(self) -> None:
        """Add the earlier gradients again, where they were set aside."""
        if self._sets_aside:
            for parameter, earlier in zip(self._parameters, self._earlier or (), strict=True):
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._is_due = self._sums and not self._now
        self._trained = self._which_train()
        self._earlier = None

    def entering(self, stage: int) -> Callable[[], None] | None:
        """Return what every rank calls before a step's first forward of `stage`, computed or not; None: nothing."""
        reducer = self._reducers.get(stage)
        return reducer.enter if isinstance(reducer, Unhalved) else None

    def _acts(self, stage: int) -> bool:
        return stage in self._reducers and (self._now or self._reducers[stage].always)

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last."""
        if self._acts(stage):
            self._reducers[stage].arm()

    def arm_for(self, stage: int, waiting: Collection[nn.Parameter]) -> Callable[[nn.Parameter], None] | None:
        """The gradients of `stage` are there but those of `waiting`; return what is called as each of them comes."""
        return self._reducers[stage].arm_for(waiting) if self._acts(stage) else None

    def launch_rest(self, stage: int) -> None:
        """Launch the buckets that the last backward of `stage` did not complete."""
        if self._acts(stage):
            self._reducers[stage].launch_rest()

    def abandon(self, stage: int) -> None:
        """Join the collectives of a stage whose step failed."""
        if self._acts(stage):
            self._reducers[stage].abandon()

    def finish(self, stage: int, *, is_drained: bool = False) -> None:
        """Block until the gradients of `stage` are summed over its replicas. `is_drained`: the step failed already."""
        if self._acts(stage):
            self._reducers[stage].finish()
            if not is_drained:
                self._reducers[stage].check()

    def tie_sum(self, group: int, *, is_drained: bool = False) -> None:
        """Block until tie group number `group` is summed, unless it is. `is_drained`: the step failed already."""
        if self._now:
            with suppress(UserError) if is_drained else nullcontext():
                self._ties[group].finish()
