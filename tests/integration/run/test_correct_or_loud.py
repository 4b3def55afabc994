"""What pipelines get silently wrong elsewhere, in real processes: right by construction, or refused on every rank.

Each line of the list, and where it is tested (paths from `tests/`; "here" is this file, "schedules" its neighbour
test_correct_or_loud_schedules.py, which tries every schedule):

| line | where |
|---|---|
| two steps add up; eval between them changes no gradient | here; unit/run/test_executor.py; test_evaluation.py |
| a batch of 10 in 4 chunks; a smaller, a larger one | schedules, here; unit/run/test_executor.py |
| another sequence length | here; models/test_branches.py, models/test_sizes.py (where a model can't) |
| autocast or another dtype from the second step on | here |
| masked means over uneven chunks, weights by tokens, chunks of weight 0 | here; unit/run/test_executor.py, test_replicas.py |
| losses that are sums | here |
| frozen first stage, mostly frozen, unused, used twice | schedules; models/test_schedules.py |
| an input that requires grad | here |
| tied over stages; two tied stages on one rank | schedules (stages 1 and 2 share a rank in a V), here |
| skips, views, in place, strides, expanded, dicts, None, nested, 0-dim | schedules; models/test_models.py |
| masks, 0-dim and one-row keywords, keywords that are no tensors | schedules; graph/test_capture.py |
| loss_fn and BatchNorm once per chunk; hooks do not pile up | schedules, here |
| receive buffers as many as are in flight | test_processes.py, test_several_stages.py |
| an exception reaches every rank within a second, the next step runs | test_errors.py |
| two pipelines on one module; the same module captured twice | here |
| compiled and recomputed stages, replicas, under zero bubble | schedules; e2e/test_data_parallel.py |
| returned losses hold no graph; targets are tuples or dicts | here |
| eval without a target | test_evaluation.py; a target that comes later: here |
"""

import functools

import pytest
import torch
from torch import nn

import stagekit
from stagekit.errors import StagekitError
from stagekit.testing import run_local, spawn

ROWS, CHUNKS, WIDTH = 10, 4, 8
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}  # stages per rank


def build():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


class Tied(nn.Module):
    """Stage 0's weight is stage 3's; stages 1 and 2, on one rank of a V, share theirs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight, self.layers[2].weight = self.layers[0].weight, self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Sequence(nn.Module):
    """[rows, length, width] of any length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.mean(1, keepdim=True)
        return x


class ReadTwice(nn.Module):
    """Both stages read the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * x


def mse(output, target):
    return ((output - target) ** 2).mean()


def masked_mean(output, target):
    """Mean over the rows whose target is a number."""
    keep = ~target.isnan().any(-1)
    return ((output[keep] - target[keep]) ** 2).mean()


def valid_rows(target):
    return float((~target.isnan().any(-1)).sum())


def squares(output, target):
    return ((output - target) ** 2).sum()


def batch(rows=ROWS, seed=0, *more):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, *more, WIDTH, generator=generator) for _ in range(2))


def masked():
    x, target = batch(seed=3)
    target[[0, 1, 2, 4, 9]] = float("nan")  # the first chunk has no row that counts
    return x, target


def whole(model, loss_fn, *batches):
    """Gradients of the model alone on whole batches."""
    for x, target in batches:
        loss_fn(model(x), target).backward()
    return {name: p.grad for name, p in model.named_parameters()}


# ---- what the ranks do


def deployed(model=None, loss_fn=mse, schedule="1f1b", example=None, split="layers", **options):
    per_rank = SCHEDULES[schedule]
    example = batch(3)[0] if example is None else example
    return stagekit.pipeline(
        build() if model is None else model, (example,), loss_fn=loss_fn, stages=2 * per_rank,
        stages_per_rank=per_rank, chunks=CHUNKS, schedule=schedule, split=split, **options,
    ).deploy()  # fmt: skip


def stepped(run, *batches):
    """Return the gradients after a step on each batch, and the last result."""
    for x, target in batches:
        result = run.step(x, target=target) if run.rank == 0 else run.step()
    return {name: None if p.grad is None else p.grad.clone() for name, p in run.named_parameters()}, result


def told(call):
    try:
        call()
    except StagekitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def two_steps(rank, schedule):
    run = deployed(schedule=schedule)
    stepped(run, batch())
    run.eval(batch(7, 5)[0])
    return stepped(run, batch(seed=2))[0]


def refusals(rank):
    run = deployed()
    stepped(run, batch())
    x, target = batch()

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            stepped(run, (x, target))

    found = {"autocast": told(under_autocast), "float64": told(lambda: stepped(run, (x.double(), target)))}
    found["target"] = told(lambda: stepped(run, (x, target.bfloat16())))
    run.eval(*((x,) if rank == 0 else ()))
    found["late target"] = told(lambda: run.eval(x, target=target) if rank == 0 else run.eval())
    run.zero_grad()
    return found | {"after": stepped(run, (x, target))[0]}


def first_steps(rank):
    """Arguments that one rank alone refuses, on the first step; then a good one."""
    x, target = batch()
    found = {}
    for failing in range(2):
        run = deployed()
        bad = {"words": (x, {"aim": target, "name": "a"}), "structure": ((x, x), target)}
        for what, given in bad.items():
            mine, aim = given if rank == failing else (x, target)
            found[failing, what] = told(functools.partial(run.step, mine, target=aim))
        found[failing, "after"] = stepped(run, (x, target))[0]
    return found


def replicas_refuse(rank):
    """The first and only rank of each replica refuses a later batch; both drop the step."""
    pipe = stagekit.pipeline(build(), (batch(3)[0],), loss_fn=mse, stages=1, replicas=2, chunks=CHUNKS)
    run, (x, target), found = pipe.deploy(), batch(seed=rank), []
    run.step(x, target=target)
    for failing in range(2):
        run.zero_grad()
        found.append(told(lambda failing=failing: run.step(x.double() if rank == failing else x, target=target)))
    found.append(run.step(x, target=target).loss)
    return found, {name: p.grad for name, p in run.named_parameters()}


def by_hand(rank):
    pipe = stagekit.pipeline(build(), (batch(3)[0],), loss_fn=mse, stages=2, chunks=CHUNKS)
    stage, (x, target) = stagekit.PipelineStage(pipe, rank), batch()
    found = []
    for rows in (3, ROWS):  # fewer than chunks
        found.append(told(lambda rows=rows: stage.begin(x[:rows], target=target[:rows])))
    for chunk in range(CHUNKS):
        stage.forward_one_chunk(chunk)
        stage.backward_one_chunk(chunk)
    return found, stage.end().loss


def inputs_with_gradients(rank):
    x, target = batch()
    x.requires_grad_()
    stepped(deployed(), (x, target))
    torn = deployed(ReadTwice(), split=["last"])
    return {"grad": x.grad, "torn": told(lambda: stepped(torn, (x, target)))}


def sizes(rank):
    example = batch(3, 0, 5)[0]
    run = deployed(Sequence(), example=example)
    found = []
    for rows, length in ((ROWS, 5), (5, 9), (13, 2)):
        run.zero_grad()
        gradients, result = stepped(run, batch(rows, 0, length))
        found.append((gradients, result.output))
    return found


def hooks(rank):
    run, fired, counts = deployed(), [], []
    run.on_action(lambda *event: fired.append(event))
    for _ in range(4):
        fired.clear()
        stepped(run, batch())
        pending = [len(p._backward_hooks or ()) for p in run.parameters()]
        pending += [len(p._post_accumulate_grad_hooks or ()) for p in run.parameters()]
        counts.append((len(fired), len(run.executor.recorder.actions), sum(pending), run.executor.pool.num_buffers))
    return counts


def two_pipelines(rank):
    model = build()
    before = [parameter.clone() for parameter in model.parameters()]
    first, second = deployed(model), deployed(model, schedule="zb-h1")
    one, other = stepped(first, batch())[0], stepped(second, batch())[0]
    is_untouched = all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    return {"grads": (one, other), "untouched": is_untouched}


def structured_targets(rank):
    def loss(output, target):
        (aim, shift), scale = target["aims"], target["scale"]
        return ((output - aim - shift) ** 2 * scale).mean()

    x, aim = batch()
    target = {"aims": (aim, torch.ones(ROWS, WIDTH)), "scale": torch.tensor(0.5)}
    gradients, result = stepped(deployed(loss_fn=loss), (x, target))
    graphs = [loss.grad_fn for loss in result.losses] + [getattr(result.output, "grad_fn", None)]
    return {"grads": gradients, "graphs": graphs, "losses": len(result.losses), "loss": type(result.loss).__name__}


def everything(rank):
    found = {("two steps", schedule): two_steps(rank, schedule) for schedule in SCHEDULES}
    found |= {("tied", schedule): stepped(deployed(Tied(), schedule=schedule), batch())[0] for schedule in SCHEDULES}
    found["masked"] = stepped(deployed(loss_fn=masked_mean, loss_weight=valid_rows), masked())
    found["masked"] = found["masked"][0], found["masked"][1].loss
    found["sum"] = stepped(deployed(loss_fn=squares, loss_weight="sum"), batch())
    found["sum"] = found["sum"][0], found["sum"][1].loss
    for scenario in (
        refusals,
        first_steps,
        replicas_refuse,
        by_hand,
        inputs_with_gradients,
        sizes,
        hooks,
        two_pipelines,
        structured_targets,
    ):
        found[scenario.__name__] = scenario(rank)
    return found


@pytest.fixture(scope="module")
def ranks():
    return spawn(everything, 2)


def merged(first, second):
    """Gradients of both ranks; a weight that both hold is equal on both."""
    for name in first.keys() & second.keys():
        assert torch.equal(first[name], second[name]), name
    return first | second


def assert_close(got, expected):
    assert got.keys() >= expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


# ---- right


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_steps_without_zeroing_add_up_and_an_evaluation_between_them_changes_nothing(ranks, schedule):
    expected = whole(build(), mse, batch(), batch(seed=2))
    assert_close(merged(*(rank["two steps", schedule] for rank in ranks)), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_train_as_one_over_ranks_and_on_one(ranks, schedule):
    assert_close(merged(*(rank["tied", schedule] for rank in ranks)), whole(Tied(), mse, batch()))


def test_a_mean_over_the_rows_that_count_is_that_of_the_whole_batch_however_chunks_fall(ranks):
    x, target = masked()
    model = build()
    expected = whole(model, masked_mean, (x, target))
    assert_close(merged(*(rank["masked"][0] for rank in ranks)), expected)
    assert ranks[0]["masked"][1] == pytest.approx(float(masked_mean(model(x).detach(), target)), rel=1e-6)


def test_losses_that_are_sums_are_added(ranks):
    model = build()
    expected = whole(model, squares, batch())
    assert_close(merged(*(rank["sum"][0] for rank in ranks)), expected)
    x, target = batch()
    assert (
        ranks[0]["sum"][1] == ranks[1]["sum"][1] == pytest.approx(float(squares(model(x).detach(), target)), rel=1e-6)
    )


def test_batches_of_other_sizes_and_lengths_follow_each_other(ranks):
    for number, (rows, length) in enumerate(((ROWS, 5), (5, 9), (13, 2))):
        model, data = Sequence(), batch(rows, 0, length)
        assert_close(merged(*(rank["sizes"][number][0] for rank in ranks)), whole(model, mse, data))
        torch.testing.assert_close(ranks[1]["sizes"][number][1], model(data[0]).detach())


def test_an_input_that_requires_grad_gets_its_gradient_where_it_was_passed(ranks):
    x, target = batch()
    mse(build()(x.requires_grad_()), target).backward()
    torch.testing.assert_close(ranks[0]["inputs_with_gradients"]["grad"], x.grad, rtol=1e-5, atol=1e-7)


def test_hooks_and_buffers_are_as_many_after_the_fourth_step_as_after_the_first(ranks):
    for rank in ranks:
        assert len(set(rank["hooks"])) == 1
        fired, actions, _, _ = rank["hooks"][0]
        assert fired == actions


def test_two_pipelines_of_one_module_do_not_know_of_each_other(ranks):
    expected = whole(build(), mse, batch())
    for number in range(2):
        assert_close(merged(*(rank["two_pipelines"]["grads"][number] for rank in ranks)), expected)
    assert all(rank["two_pipelines"]["untouched"] for rank in ranks)


def test_targets_may_be_nested_and_what_is_returned_holds_no_graph(ranks):
    def loss(output, target):
        return ((output - target - 1.0) ** 2 * 0.5).mean()

    found = [rank["structured_targets"] for rank in ranks]
    assert_close(merged(*(each["grads"] for each in found)), whole(build(), loss, batch()))
    assert {each["loss"] for each in found} == {"float"}
    assert found[1]["losses"] == CHUNKS
    assert all(graph is None for each in found for graph in each["graphs"])


# ---- or loud


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("autocast", "under torch.autocast('cpu', torch.bfloat16)"),
        ("float64", "args[0] is torch.float64; the model was captured with torch.float32"),
        ("target", "the target holds bfloat16, that of the first step() held float32"),
        ("late target", "rank 0 passed a target to eval() at step 1, but none to the first eval()"),
    ],
)
def test_another_type_or_mode_from_the_second_step_on_is_refused_on_every_rank(ranks, what, words):
    assert words in ranks[0]["refusals"][what]
    assert ranks[1]["refusals"][what] != "nothing"
    assert_close(merged(*(rank["refusals"]["after"] for rank in ranks)), whole(build(), mse, batch()))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("what", "words"), [("words", "the target holds str"), ("structure", "args[0] is a tuple")])
def test_arguments_that_one_rank_refuses_on_the_first_step_are_refused_by_all(ranks, failing, what, words):
    for rank in ranks:
        assert words in rank["first_steps"][failing, what]
    assert_close(merged(*(rank["first_steps"][failing, "after"] for rank in ranks)), whole(build(), mse, batch()))


def test_a_batch_that_one_replica_refuses_is_dropped_by_all_and_the_next_one_runs(ranks):
    for refused, gradients in (rank["replicas_refuse"] for rank in ranks):
        assert all("args[0] is torch.float64" in words for words in refused[:2])
        both = [batch(seed=replica) for replica in range(2)]
        x, target = (torch.cat(parts) for parts in zip(*both, strict=True))
        assert_close(gradients, whole(build(), mse, (x, target)))


def test_a_batch_is_refused_on_every_rank_where_steps_are_made_by_hand(ranks):
    for (refused, good), loss in (rank["by_hand"] for rank in ranks):
        assert "3 rows" in refused
        assert good == "nothing"
        assert loss > 0.0


def test_an_input_that_requires_grad_and_is_read_on_two_ranks_is_refused(ranks):
    assert "args[0] requires grad, but stages on ranks [0, 1] read it" in ranks[0]["inputs_with_gradients"]["torn"]
    assert ranks[1]["inputs_with_gradients"]["torn"] != "nothing"


def test_autocast_around_a_step_is_refused_in_one_process_too():
    pipe = stagekit.pipeline(build(), (batch(3)[0],), loss_fn=mse, stages=2, chunks=CHUNKS)
    x, target = batch()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StagekitError, match="enter autocast inside the model"):
        run_local(pipe, x, target=target)
