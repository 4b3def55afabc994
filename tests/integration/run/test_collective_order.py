"""The order of collectives is the same on all ranks of each group, however unequally fast they compile."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.backends.registry import lookup_backend

import stagekit
from stagekit.run.groups import Groups
from stagekit.testing import spawn

WIDTH, ROWS, CHUNKS, STEPS, SLOW = 8, 12, 2, 2, 3
COLLECTIVES = ("all_reduce", "all_gather", "barrier")


class Model(nn.Module):
    """Compiled pieces, a SyncBatchNorm between them, and a weight of both stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.norms = nn.ModuleList(nn.SyncBatchNorm(WIDTH) for _ in range(6))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return x


def loss(output, target):
    return ((output - target) ** 2).mean()


def compile_last(rank):
    """Have the slow rank begin to compile when the others' stages are compiled, and warm; return the backend's name."""
    store, wait = dist.distributed_c10d._get_default_store(), Groups.wait_for_everyone

    def compile_graph(gm, inputs):
        if rank == SLOW:
            store.wait([f"{other} is warm" for other in range(4) if other != SLOW])
        return lookup_backend("aot_eager")(gm, inputs)

    def wait_for_everyone(self):
        store.set(f"{rank} is warm", "1")
        wait(self)

    Groups.wait_for_everyone = wait_for_everyone
    register_backend(compile_graph, name="waiting")
    return "waiting"


def log_collectives():
    """Note from now on what this rank calls, by the ranks of the group: which collective, of how many numbers."""
    calls = {}

    def noted(name, real):
        @functools.wraps(real)
        def call(*args, group=None, **kwargs):
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            members = tuple(dist.get_process_group_ranks(group))
            group_name = dist.group.WORLD.group_name if group is None else group.group_name
            sizes = [(tensor.numel(), str(tensor.dtype)) for tensor in tensors]
            calls.setdefault((members, group_name), []).append((name, sizes))
            return real(*args, group=group, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, noted(name, getattr(dist, name)))
    return calls


def trained(rank):
    """Return the log and the losses."""
    calls, name = log_collectives(), compile_last(rank)
    run = stagekit.pipeline(
        Model, (torch.zeros(ROWS // 2 // CHUNKS, WIDTH),), loss_fn=loss, stages=2, chunks=CHUNKS, schedule="1f1b", replicas=2,
        split=["layers.3"], buckets={"cap": 300, "first": 200}, compile=name,
    ).deploy()  # fmt: skip
    generator = torch.Generator().manual_seed(run.replica)
    x, target = (torch.randn(ROWS // 2, WIDTH, generator=generator) for _ in range(2))
    losses = [run.step(x, target=target).loss for _ in range(STEPS)]
    assert run.compiled == {rank % 2: name}
    return calls, losses


def test_collectives_come_in_one_order_on_all_ranks_of_a_group_also_where_one_rank_compiles_last():
    logs, losses = zip(*spawn(trained, 4), strict=True)
    assert len({tuple(each) for each in losses}) == 1
    groups = {key for log in logs for key in log if len(key[0]) > 1}
    assert {members for members, _ in groups} == {(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3)}
    for members, name in groups:
        first, *others = (logs[rank].get((members, name), []) for rank in members)
        assert all(other == first for other in others), (members, name)
    sums = max(len(log[key]) for log in logs for key in groups if key[0] == (0, 2) and key in log)
    assert sums >= 2 * 3 * CHUNKS * STEPS  # a sum of each norm in each direction
