"""A small program whose last rank fails in its second step, in the way that `how` names."""

import os
import signal
import time

import torch
from torch import nn

from stagekit.program import Batch, ProgramDefaults


class Ends(ProgramDefaults):
    calls = 0

    def __init__(self, how):
        self.how = how

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def example_inputs(self):
        return (torch.zeros(2, 4),), {}

    def optimizer(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

    def batches(self, start_step, replica, replicas):
        while True:
            yield Batch((torch.ones(4, 4),), {}, torch.zeros(4, 4))

    def loss(self, output, target):
        Ends.calls += 1
        value = ((output - target) ** 2).mean()
        if Ends.calls <= 2 or self.how == "node loss":
            time.sleep(0.02)
            return value
        match self.how:
            case "exit 7" | "exit 0":
                os._exit(int(self.how[-1]))
            case "exception":
                raise ValueError("told by itself")
            case "OOM":
                bytearray(4 << 30)
            case "SIGKILL" | "SIGSEGV" | "SIGSTOP":
                os.kill(os.getpid(), signal.Signals[self.how])
        return value * float("nan")
