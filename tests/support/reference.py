"""The plain loop: one process, the unsplit model, the same chunks. Knows torch and the program, nothing of pipelines."""

from __future__ import annotations

import torch


def train(program, *, steps, chunks, seed, replicas=1, accumulate=1):
    """Return (losses, state dict) of training the unsplit model on the whole batch, chunk by chunk.

    A step takes `accumulate` batches: its loss is their mean.
    """
    program.chunks, program.replicas = chunks, replicas
    torch.manual_seed(seed)
    model = program.build_model()
    optimizer = program.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    streams = [program.batches(0, replica, replicas) for replica in range(replicas)]
    losses = []
    for _ in range(steps):
        batches = [[next(stream) for stream in streams] for _ in range(accumulate)]
        losses.append(sum(_add_gradients(program, model, batch, chunks, accumulate) for batch in batches) / accumulate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, model.state_dict()


def _add_gradients(program, model, batches, chunks, accumulate):
    """Add the gradient of one batch, in a part per replica, divided by `accumulate`; return its loss."""
    pieces = []
    for batch in batches:
        args = [value.tensor_split(chunks) for value in batch.args]
        kwargs = {name: value.tensor_split(chunks) for name, value in batch.kwargs.items()}
        targets = batch.target.tensor_split(chunks)
        pieces += [
            ([a[c] for a in args], {name: value[c] for name, value in kwargs.items()}, targets[c])
            for c in range(chunks)
        ]
    weight_of = getattr(program, "loss_weight", lambda target: float(len(target)))
    weights = [weight_of(target) for *_, target in pieces]
    total, loss_sum = sum(weights), 0.0
    for (args, kwargs, target), weight in zip(pieces, weights, strict=True):
        loss = program.loss(model(*args, **kwargs), target)
        loss.backward(torch.tensor(weight / total / accumulate))
        loss_sum += weight * float(loss.detach())
    return loss_sum / total
