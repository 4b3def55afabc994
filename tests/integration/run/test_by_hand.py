"""Steps by hand: an error on one rank ends the step on all of them, whatever order their chunks run in, and the next one runs."""

import functools

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import StageError, UserError
from stagekit.testing import spawn

ROWS, CHUNKS, WIDTH = 12, 4, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tables = nn.ModuleList(nn.Embedding(10, WIDTH) for _ in range(2))

    def forward(self, x, index, last_index):
        return self.last(self.first(x) + self.tables[0](index)) + self.tables[1](last_index)


def loss(output, target):
    return ((output - target) ** 2).mean()


def batch(bad_stage=None):
    """`bad_stage`: where chunk 2 has an index beyond the table."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    indices = [torch.arange(ROWS) % 10 for _ in range(2)]
    if bad_stage is not None:
        indices[bad_stage][7] = 99
    return x, *indices, target


@functools.cache
def pipe():
    example = tuple(value[:3] for value in batch()[:3])
    return stagekit.pipeline(Model, example, loss_fn=loss, stages=2, chunks=CHUNKS, split=["last"], seed=1)


def forwards_first():
    return [("forward_one_chunk", chunk) for chunk in range(CHUNKS)] + [
        ("backward_one_chunk", chunk) for chunk in range(CHUNKS)
    ]


ORDERS = {
    "all forwards first": forwards_first(),
    "a chunk left out": forwards_first()[:-1],
    "a chunk twice": [*forwards_first()[:2], ("forward_one_chunk", 0)],
    "a backward too early": [*forwards_first()[:2], ("backward_one_chunk", 2)],
    "a chunk too many": [*forwards_first()[:2], ("forward_one_chunk", CHUNKS)],
}


def told(stage, order, bad_stage=None):
    """Return what a step by hand raised, or its loss."""
    *args, target = batch(bad_stage)
    try:
        stage.begin(*args, target=target)
        for call, chunk in ORDERS[order]:
            getattr(stage, call)(chunk)
        return stage.end().loss
    except (StageError, UserError) as error:
        return type(error).__name__, str(error), all(p.grad is None for p in stage.run.parameters())


def fails_backward(rank, stage):
    """The last stage's third backward fails."""
    seen = []

    def fail(_):
        seen.append(None)
        if len(seen) == 3:
            raise ValueError("too little")

    hook = next(stage.run.parameters()).register_hook(fail) if rank == 1 else None
    found = told(stage, "all forwards first")
    if hook is not None:
        hook.remove()
    return found


def everything(rank):
    stage = stagekit.PipelineStage(pipe(), rank)
    found = {"backward": (fails_backward(rank, stage), told(stage, "all forwards first"))}
    stage.run.zero_grad()
    for bad_stage in (0, 1):
        found[bad_stage] = told(stage, "all forwards first", bad_stage), told(stage, "all forwards first")
        stage.run.zero_grad()
    for order in list(ORDERS)[1:]:
        for who in (0, 1):
            own = order if rank == who else "all forwards first"
            found[order, who] = told(stage, own), told(stage, "all forwards first")
            stage.run.zero_grad()
    return found


@pytest.fixture(scope="module")
def ranks():
    return spawn(everything, 2, timeout_s=120.0)


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        (0, 0, "rank 0, stage 0, chunk 2, F: IndexError: index out of range"),
        (1, 1, "rank 1, stage 1, chunk 2, F: IndexError: index out of range"),
        ("backward", 1, "rank 1, stage 1, chunk 2, B: ValueError: too little"),
    ],
)
def test_an_error_in_a_stage_by_hand_reaches_the_other_rank_and_the_next_step_runs(ranks, what, rank, words):
    failing, other = ranks[rank][what], ranks[1 - rank][what]
    kind, text, is_clean = failing[0]
    assert kind == "StageError" and text.startswith(words) and is_clean
    assert other[0] == ("RemoteError", text, True)
    assert failing[1] == other[1] and isinstance(failing[1], float)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("a chunk left out", "the step ended before rank {0} ran {0}B3"),
        ("a chunk twice", "rank {0} ran {0}F0 in this step already"),
        ("a backward too early", "rank {0}: run {0}F2 before its backward {0}B2"),
        ("a chunk too many", "rank {0} has no {0}F4"),
    ],
)
def test_chunks_by_hand_that_are_no_step_are_refused_on_every_rank(ranks, order, words, who):
    own, other = ranks[who][order, who], ranks[1 - who][order, who]
    assert own[0] == ("UserError", words.format(who), True)
    assert other[0][0] == "RemoteError" and words.format(who) in other[0][1]
    assert own[1] == other[1] and isinstance(own[1], float)


def replicas_by_hand(rank):
    """Return what a step of one stage in two replicas came to, its backwards in the list's order and in another."""
    example = tuple(value[:3] for value in batch()[:3])
    pipe = stagekit.pipeline(
        Model, example, loss_fn=loss, stages=1, chunks=CHUNKS, replicas=2, schedule="gpipe", seed=1
    )
    results = []
    for order in (range(CHUNKS), reversed(range(CHUNKS))):
        stage = stagekit.PipelineStage(pipe, 0)
        *args, target = (value.repeat(2, *[1] * (value.ndim - 1)).chunk(2)[rank] for value in batch())
        try:
            stage.begin(*args, target=target)
            for chunk in range(CHUNKS):
                stage.forward_one_chunk(chunk)
            for chunk in order:
                stage.backward_one_chunk(chunk)
            results.append(stage.end().loss)
        except (StageError, UserError) as error:
            results.append(str(error))
    return results


def test_replicas_by_hand_sum_with_the_backward_that_the_list_has_last_and_refuse_another_order():
    for right, wrong in spawn(replicas_by_hand, 2):
        assert isinstance(right, float)
        assert (
            "gradients of stage 0 are summed over replicas with its backward of chunk 3; run it after 0B0, 0B1, 0B2"
            in wrong
        )


def test_in_one_process_a_step_by_hand_that_failed_twice_leaves_the_gradients_and_the_next_one_runs():
    def strict(output, target):
        if bool((target > 90).any()):
            raise ValueError("a target beyond reach")
        return loss(output, target)

    example = tuple(value[:3] for value in batch()[:3])
    stage = stagekit.PipelineStage(
        stagekit.pipeline(Model, example, loss_fn=strict, stages=1, chunks=CHUNKS, seed=1), 0
    )
    *args, target = batch()
    expected = told(stage, "all forwards first")
    before = {name: p.grad.clone() for name, p in stage.run.named_parameters()}
    stage.begin(*args, target=torch.full_like(target, 99.0))
    for chunk in range(2):
        with pytest.raises(StageError, match="a target beyond reach"):
            stage.forward_one_chunk(chunk)
    assert all(torch.equal(p.grad, before[name]) for name, p in stage.run.named_parameters())
    stage.run.zero_grad()
    assert told(stage, "all forwards first") == expected
    assert all(torch.equal(p.grad, before[name]) for name, p in stage.run.named_parameters())
