"""Stages that the user's `parallelize` changed: sharded by FSDP2 (`fully_shard`), or wrapped in DistributedDataParallel.

Both expect one backward per step; a pipeline has one per chunk. So nothing is synchronised until a stage's last chunk,
FSDP2 gathers its parameters once per step, and the step's gradients are summed over replicas, not averaged: losses are
weighted over all replicas already. Such a stage computes all of its backward in B or I: weights that wait are unknown
to both. Called by stagekit.run.runtime.

Note [Order]: in torch the collectives of a forward come with its call, so a replica whose forward fails before that, or is
not computed after an error elsewhere, would leave the others in theirs, and those of all stages wait for each other. So
what a forward would exchange is exchanged before a step's first one, at its place of the list, by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stagekit.errors import PeerError, UserError
from stagekit.plan.contract import StageSpec
from stagekit.run.data_parallel import Reducer, Unhalved, whole

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def parallelized(parallelize: Parallelize, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return what runs in place of a stage's module. Raises UserError for what the runtime can't drive.

    `mesh`: the replicas of this stage, one dimension named "replicas".
    """
    try:
        made = parallelize(module, mesh)
    except RuntimeError as error:
        if "DDP expects same model across all ranks" not in str(error):
            raise
        raise UserError(
            "parallelize made a DistributedDataParallel over ranks that don't hold the same stage; give it "
            "process_group=mesh.get_group()"
        ) from error
    is_inside = isinstance(made, DistributedDataParallel) and made.module is module
    if made is not module and not is_inside:
        raise UserError(
            f"parallelize returned a {type(made).__name__}; return the stage's module, changed in place (fully_shard), or "
            "DistributedDataParallel(stage_module, process_group=mesh.get_group())"
        )
    if isinstance(made, DistributedDataParallel):
        _check_options(made, mesh)
    for part in made.modules():  # each holds its own
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
            part.set_reduce_scatter_unused_params(True)  # or replicas would exchange different sizes
    return made


def _check_options(made: DistributedDataParallel, mesh: DeviceMesh) -> None:
    """Raise UserError for other ranks than the stage's replicas, and for what doesn't go with several backwards per step."""
    ranks = dist.get_process_group_ranks(made.process_group)
    if ranks != dist.get_process_group_ranks(mesh.get_group()):
        raise UserError(
            f"parallelize made a DistributedDataParallel over ranks {ranks}, which don't hold the same stage; give it "
            "process_group=mesh.get_group()"
        )
    options = {
        "find_unused_parameters": "what no chunk used gets a zero gradient anyway",
        "static_graph": "a pipeline has several backwards per step",
        "gradient_as_bucket_view": "gradients that a step adds to would be overwritten",
    }
    for name, why in options.items():
        if getattr(made, name):
            raise UserError(f"parallelize made a DistributedDataParallel with {name}=True; leave it out: {why}")


def is_sharded(made: nn.Module) -> bool:
    """Say whether FSDP2 holds the parameters."""
    return isinstance(made, FSDPModule)


def reducer_of(spec: StageSpec, made: nn.Module, module: nn.Module, mesh: DeviceMesh) -> dict[int, Reducer]:
    """Return what sums the gradients of a stage that `parallelize` returned; nothing for an ordinary one."""
    stage, parameters = spec.index, dict(module.named_parameters())
    unreached = [parameters[p.name] for p in spec.parameters if not p.is_reached and p.name in parameters]
    if isinstance(made, FSDPModule):
        return {stage: ShardedReducer(stage, made, unreached)}
    if isinstance(made, DistributedDataParallel):
        return {stage: WrappedReducer(stage, made, mesh.size(), unreached)}
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise UserError(
            f"parallelize made DTensors of parameters of stage {stage} without fully_shard on its module; call "
            "fully_shard(stage_module) last, also where parts of it are sharded; other DTensors are not driven"
        )
    return {}


def trained_names(module: Any) -> frozenset[str]:
    """Return the parameters of a stage that train."""
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def check_still_training(stage: int, module: Any, trained: frozenset[str], wrapper: str) -> None:
    """Raise UserError for a parameter that was frozen after deploy, which torch's wrappers don't know."""
    if frozen := trained - trained_names(module):
        raise UserError(
            f"{min(frozen)} (stage {stage}) was frozen after parallelize gave it to {wrapper}, which goes on to sum it; freeze "
            "it before the pipeline is deployed, or train without parallelize"
        )


class WholeCopy:
    """A stage's parameters and buffers to evaluate on, where its parameters are shards: whole only while `filled`."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage, self._module = stage, module
        self.module = nn.Module()  # the stage's names; its own buffers
        self._empty: dict[str, nn.Parameter] = {}
        known: dict[int, nn.Parameter] = {}
        for path, child in module.named_modules():
            twin = self.module
            for part in filter(None, path.split(".")):
                if part not in twin._modules:
                    twin.add_module(part, nn.Module())
                twin = twin.get_submodule(part)
            for name, buffer in child._buffers.items():
                twin.register_buffer(name, buffer)
            for name, value in child._parameters.items():
                if value is not None:
                    empty = nn.Parameter(torch.empty(0, dtype=value.dtype, device=value.device), requires_grad=False)
                    twin.register_parameter(name, known.setdefault(id(value), empty))
                    self._empty[f"{path}.{name}" if path else name] = known[id(value)]

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Gather the parameters' present values, on every replica alike; forget them afterwards. Raises PeerError."""
        own = dict(self._module.named_parameters(remove_duplicate=False))  # other objects while FSDP2 has them gathered
        try:
            try:
                for name, parameter in self._empty.items():
                    parameter.data = whole(own[name].detach())
            except RuntimeError as error:
                raise PeerError(f"gathering the weights of stage {self._stage} to evaluate: {error}") from error
            yield
        finally:
            for parameter in self._empty.values():
                parameter.data = parameter.data.new_empty(0)


class ShardedReducer(Unhalved):
    """One stage under FSDP2: gathered at its first forward of a step, summed and sharded again after its last chunk.

    After every step, inside `no_sync` too: what was not summed would lie on the gathered parameters, unknown to whoever
    zeroes, clips or optimizes the shards.
    """

    always = True

    def __init__(self, stage: int, module: FSDPModule, unreached: Collection[nn.Parameter] = ()) -> None:
        """`unreached`: parameters of the stage that no output depends on."""
        super().__init__(stage)
        self._module = module
        self._trained = trained_names(module)
        self._unreached = tuple(unreached)
        self._keep(gathered=True)

    def check_trained(self) -> None:
        """Raise UserError for a parameter that was frozen meanwhile."""
        check_still_training(self._stage, self._module, self._trained, "fully_shard")

    def _keep(self, *, gathered: bool) -> None:
        self._module.set_requires_gradient_sync(not gathered)
        self._module.set_is_last_backward(not gathered)
        self._module.set_reshard_after_backward(not gathered)
        self._module.set_reshard_after_forward(not gathered)

    def _groups(self) -> Iterator[Any]:
        for state in self._state()._state_ctx.all_states:
            yield from state._fsdp_param_groups

    def _state(self) -> Any:
        return self._module._get_fsdp_state()

    def _gather(self) -> None:
        """Gather the parameters, those of nested `fully_shard` too: in one order, whatever ran before."""
        self._state()._lazy_init()
        for group in self._groups():
            group.unshard()
            group.wait_for_unshard()

    def launch_rest(self) -> None:
        """Sum the step's gradients into the shards."""
        started = monotonic_ns()
        self._keep(gathered=False)
        for group in self._groups():
            group.post_backward()
        self._state()._root_post_backward_final_callback()
        self._keep(gathered=True)
        for parameter in self._unreached:
            parameter.grad = None  # a zero of FSDP2's
        self.note(started)
        if self.recorder is not None:
            self.recorder.reduce_wait_ns[self._stage] = monotonic_ns() - started  # nothing is computed meanwhile

    def drop(self) -> None:
        """Forget the gradients of a step that failed, and shard again."""
        for group in self._groups():
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):  # gathered once
                    each.unsharded_param.grad = each.unsharded_accumulated_grad = None
            group._training_state = type(group._training_state).IDLE  # it may have failed within a forward
            group.reshard()
        self._state()._state_ctx.iter_forward_root = None


class WrappedReducer(Unhalved):
    """One stage under DistributedDataParallel: prepared for its last chunk's backward only."""

    def __init__(
        self, stage: int, module: DistributedDataParallel, replicas: int, unreached: Collection[nn.Parameter] = ()
    ) -> None:
        """`unreached`: parameters of the stage that no output depends on."""
        super().__init__(stage)
        self._module, self._replicas, self._unreached = module, replicas, tuple(unreached)
        self._trained = trained_names(module.module)
        self._parameters = [p for p in module.module.parameters() if p.requires_grad]
        self._missing: set[nn.Parameter] = set()
        self._is_armed = False
        module.require_backward_grad_sync = False  # as inside no_sync
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._seen)

    def check_trained(self) -> None:
        """Raise UserError for a parameter that was frozen meanwhile."""
        check_still_training(self._stage, self._module.module, self._trained, "DistributedDataParallel")

    def _seen(self, parameter: Tensor) -> None:
        if self._is_armed:
            self._missing.discard(parameter)

    def _gather(self) -> None:
        """Take the first replica's buffers, and agree on torch's buckets once it has seen a backward."""
        module = self._module
        if module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        module.require_forward_param_sync = True
        if module._check_sync_bufs_pre_fwd():
            module._sync_buffers()
        module.require_forward_param_sync = False  # not once more for every chunk

    def arm(self) -> None:
        """The next backward is the stage's last of the step."""
        self._started = monotonic_ns()
        self._missing, self._is_armed = set(self._parameters), True
        self._module.reducer.prepare_for_backward([])

    def launch_rest(self) -> None:
        """Add zeros to the parameters that the last chunk did not use, so that no replica waits for them."""
        if not self._is_armed:
            self.arm()
        if self._missing:
            missing = [parameter for parameter in self._parameters if parameter in self._missing]
            frozen = [parameter for parameter in missing if not parameter.requires_grad]  # the step is refused
            for parameter in frozen:
                parameter.requires_grad_(True)
            torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
            for parameter in frozen:
                parameter.requires_grad_(False)
        self._is_armed = False
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._replicas)  # it averages
        for parameter in self._unreached:
            parameter.grad = None  # a zero, so that DistributedDataParallel waits for nobody
        self.note(self._started)
