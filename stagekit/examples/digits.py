"""A small convolutional network with BatchNorm on scikit-learn's handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagekit.examples.text import chunk_rows, share_of
from stagekit.program import Batch, ProgramDefaults


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return images float32 [1797, 1, 8, 8] in 0..1 and labels int64 [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.float32) / 16.0).unsqueeze(1)
    return images, torch.from_numpy(data.target.astype(np.int64))


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, in-place ReLU."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, channels_out, height / stride, width / stride]."""
        return self.relu(self.norm(self.conv(x)))  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """Images [rows, 1, 8, 8] → logits [rows, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            ConvBlock(1, width, 1),
            ConvBlock(width, width, 1),
            ConvBlock(width, 2 * width, 2),
            ConvBlock(2 * width, 2 * width, 1),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.blocks(images).mean((2, 3)))  # type: ignore[no-any-return]


class Program(ProgramDefaults):
    """Classifies digits. BatchNorm sees one chunk at a time and updates its statistics once per chunk."""

    def __init__(self, *, width: int = 16, batch: int = 64, lr: float = 1e-2, seed: int = 0) -> None:
        self.width, self.batch, self.lr, self.seed = width, batch, lr, seed

    def build_model(self) -> nn.Module:
        """Return the model with its initial weights."""
        return ConvNet(self.width)

    def example_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the images of one chunk."""
        return (torch.zeros(chunk_rows(self.batch, self.chunks, self.replicas), 1, 8, 8),), {}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=self.lr, momentum=0.9)

    def batches(self, start_step: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield random images, drawn from (seed, step)."""
        images, labels = digits()
        mine = share_of(self.batch, replica, replicas)
        step = start_step
        while True:
            chosen = torch.from_numpy(
                np.random.default_rng((self.seed, step)).integers(0, len(images), self.batch)[mine]
            )
            yield Batch((images[chosen],), {}, labels[chosen])
            step += 1
