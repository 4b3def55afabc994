"""What `parallelize` may make of a stage, for the tests of it; and a loss that raises where a test wants it to."""

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def sharded(module, mesh):
    return fully_shard(module, mesh=mesh)


def sharded_layers(module, mesh):
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def wrapped(module, mesh, **options):
    return DistributedDataParallel(module, process_group=mesh.get_group(), **options)


KINDS = {"FSDP2": sharded, "FSDP2 by layer": sharded_layers, "DDP": wrapped}


def loss(output, target):
    if bool((target > 90).any()):
        raise ValueError("a target beyond reach")
    return ((output - target) ** 2).mean()


def whole_gradients(run):
    """Return this rank's gradients by name, none of them sharded."""
    held = {name: p.grad for name, p in run.named_parameters() if p.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().clone() for name, grad in held.items()}
