"""The plain loop: one process, the unsplit model, the same chunks. Knows torch and the program, nothing of pipelines."""

from __future__ import annotations

import torch


def train(program, *, steps, chunks, seed, replicas=1):
    """Return (losses, state dict) of training the unsplit model on the whole batch, chunk by chunk."""
    program.chunks, program.replicas = chunks, replicas
    torch.manual_seed(seed)
    model = program.build_model()
    optimizer = program.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    streams = [program.batches(0, replica, replicas) for replica in range(replicas)]
    losses = []
    for _ in range(steps):
        pieces = []
        for stream in streams:
            batch = next(stream)
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
            loss.backward(torch.tensor(weight / total))
            loss_sum += weight * float(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum / total)
    return losses, model.state_dict()
