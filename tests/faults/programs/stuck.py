"""A small program one of whose ranks stops making progress in its third step, in the way that `how` names."""

import ctypes
import itertools
import time

import torch
import torch.distributed as dist
from torch import nn

from stagekit.program import Batch, ProgramDefaults

LIBC = ctypes.PyDLL(None)  # a call through it keeps the interpreter's lock


class Stuck(ProgramDefaults):
    def __init__(self, how):
        self.how = how
        self.losses = itertools.count()

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def example_inputs(self):
        return (torch.zeros(2, 4),), {}

    def optimizer(self, named_parameters):
        return Steps([parameter for _, parameter in named_parameters], self.how)

    def batches(self, start_step, replica, replicas):
        for step in itertools.count():
            if self.how == "data" and step == 2:
                time.sleep(3600)
            yield Batch((torch.ones(4, 4),), {}, torch.zeros(4, 4))

    def loss(self, output, target):
        if self.how == "lock" and next(self.losses) == 5:
            LIBC.sleep(3600)
        time.sleep(0.02)
        return ((output - target) ** 2).mean()

    def on_step(self, step, metrics):
        if self.how == "hook" and step == 2:
            time.sleep(3600)


class Steps(torch.optim.SGD):
    """Plain SGD; that of the first rank may sleep in its third step."""

    def __init__(self, parameters, how):
        super().__init__(parameters, lr=0.1)
        self.how, self.count = how, itertools.count()

    def step(self, closure=None):
        if self.how == "update" and dist.get_rank() == 0 and next(self.count) == 2:
            time.sleep(3600)
        super().step(closure)
