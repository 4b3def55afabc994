"""Programs with one mistake each, and small ones that do as they should."""

import os
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from stagekit.program import Batch, ProgramDefaults


class Fine(ProgramDefaults):
    """A perceptron on noise; `pause_s` makes its steps slow enough to be watched."""

    def __init__(self, pause_s=0.0, width=8, layers=4):
        self.pause_s, self.width, self.layers = pause_s, width, layers

    def build_model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(self.layers)))

    def example_inputs(self):
        return (torch.zeros(2, self.width),), {}

    def loss(self, output, target):
        return ((output - target) ** 2).mean()

    def optimizer(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

    def batches(self, start_step, replica, replicas):
        generator = torch.Generator().manual_seed(start_step + replica)
        while True:
            time.sleep(self.pause_s)
            yield Batch((torch.randn(8, self.width, generator=generator),), {}, torch.zeros(8, self.width))


class Branches(Fine):
    """Its model decides on data, which no capture can follow."""

    def build_model(self):
        class Branching(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

            def forward(self, x):
                if x.sum() > 0:
                    return self.layers(x)
                return x

        return Branching(self.width)


class LossBreaks(Fine):
    """Its loss raises in the third step, on the last stage only."""

    calls = 0

    def loss(self, output, target):
        LossBreaks.calls += 1
        if LossBreaks.calls > 8:
            raise ValueError("the label file is one line short")
        return super().loss(output, target)


class Explodes(Fine):
    """Its loss becomes NaN in the second step."""

    calls = 0

    def loss(self, output, target):
        Explodes.calls += 1
        return super().loss(output, target) * (float("nan") if Explodes.calls > 4 else 1.0)


class Dies(Fine):
    """The process of the first stage kills itself while data is read."""

    def batches(self, start_step, replica, replicas):
        for number, batch in enumerate(super().batches(start_step, replica, replicas)):
            if number == 2:
                os.kill(os.getpid(), 9)
            yield batch


class Incomplete(ProgramDefaults):
    """Lacks most of what a program needs."""

    def build_model(self):
        return nn.Linear(1, 1)


class Plain:
    """Inherits nothing of ours, has a schedule of learning rates, and stops itself after the fourth step."""

    def build_model(self):
        return Fine().build_model()

    def example_inputs(self):
        return Fine().example_inputs()

    def batches(self, start_step, replica, replicas):
        return Fine().batches(start_step, replica, replicas)

    def loss(self, output, target):
        return Fine().loss(output, target)

    def optimizer(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def on_step(self, step, metrics):
        return step == 3


class Evaluates(Fine):
    """Scores held-out data between its steps."""

    def evaluate(self, run, step):
        generator = torch.Generator().manual_seed(99)
        held_out = torch.randn(10, self.width, generator=generator), torch.zeros(10, self.width)
        result = run.eval(held_out[0], target=held_out[1]) if run.rank == 0 else run.eval()
        return {"held_out": result.loss, "seen": step + 1}


class Sharded(Evaluates):
    """Its weights are spread over the replicas of a stage."""

    def parallelize(self, stage_module, mesh):
        return fully_shard(stage_module, mesh=mesh)


class Overflows(Fine):
    """The gradient of its fourth batch is beyond what 16 bits hold, its loss is not; the rate falls with each update."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def batches(self, start_step, replica, replicas):
        for number, batch in enumerate(super().batches(start_step, replica, replicas)):
            yield Batch(batch.args, {}, batch.target + (1e3 if number == 3 else 0.0))


class Collects(Fine):
    """Trains, and has what only a forward job is asked for."""

    def collect(self, outputs):
        pass


class ForgetsToReturn(Fine):
    """Its optimizer() lacks the return."""

    def optimizer(self, named_parameters):
        torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)
