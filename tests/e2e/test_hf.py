"""A transformers directory is a program: it trains over 2 workers as the plain model does in a loop."""

from pathlib import Path

import pytest
import torch

from stagekit.graph.values.build import Start, open_model
from stagekit.load import load_program
from tests.support import hub, reference

PROGRAMS = Path(__file__).parent / "programs"
SEED = 5


def job(program, data, *, source=None, **more):
    return {
        "version": 1,
        "name": "hub",
        "program": program,
        "params": {"data": data, "sequence": 16, "batch": 8, "learning_rate": 0.003},
        "source": source,
        "pipeline": {"stages": 2, "chunks": 2},
        "train": {"steps": 4, "seed": SEED},
        **more,
    }


def plain(folder, data, *, from_files):
    """Losses of transformers' own model in a loop that knows nothing of pipelines."""
    program = load_program(f"hf:{folder}", job("", str(data))["params"])
    if from_files:
        import transformers

        program.build_model = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    return reference.train(program, steps=4, chunks=2, seed=SEED)[0]


def test_a_llama_directory_with_weights_trains_as_the_plain_model_does(cluster, tmp_path):
    folder = hub.write_model(tmp_path / "llama", "llama", weights_seed=3)
    data = hub.write_text(tmp_path / "text.txt")
    spec = job(f"hf:{folder}", [str(data)])
    spec["pipeline"]["balance"] = {"memory": "1GiB", "speeds": [2, 1]}
    ended = cluster.run(spec)
    assert cluster.losses(ended.job_id) == plain(folder, data, from_files=True)
    assert ended.plan.bit_equal == "yes"


def test_a_relative_directory_without_weights_is_uploaded_and_starts_from_the_seed(cluster, tmp_path):
    folder = hub.write_model(tmp_path / "code" / "model", "gpt2")
    data = hub.write_text(tmp_path / "code" / "text.txt")
    ended = cluster.run(job("hf:./model", "text.txt", source=str(tmp_path / "code")))
    assert cluster.losses(ended.job_id) == pytest.approx(plain(folder, data, from_files=False), rel=1e-6)


def test_per_op_and_weights_of_the_job_file_reach_the_workers(cluster, tmp_path):
    folder = hub.write_model(tmp_path / "model", "llama")
    data = hub.write_text(tmp_path / "text.txt")
    ended = cluster.run(job(f"hf:{folder}", str(data), init="per_op"))
    program = load_program(f"hf:{folder}", job("", str(data))["params"])
    module, source = open_model(program.build_model, SEED, Start("per_op"))
    with torch.no_grad():
        real = program.build_model()
        real.load_state_dict(source.take(list(module.state_dict())))
        batch = next(program.batches(0, 0, 1))
        first = float(program.loss(real(**batch.kwargs), batch.target))
    assert cluster.losses(ended.job_id)[0] == pytest.approx(first, rel=1e-6)
    from_files = hub.write_model(tmp_path / "other", "llama", weights_seed=3)
    ended = cluster.run(job(f"hf:{folder}", str(data), weights=str(from_files / "model.safetensors")))
    assert cluster.losses(ended.job_id) == plain(from_files, data, from_files=True)


def test_a_constructor_that_loads_weights_itself_keeps_them_and_the_plan_says_what_that_costs(cluster, tmp_path):
    folder = hub.write_model(tmp_path / "llama", "llama", weights_seed=3)
    data = hub.write_text(tmp_path / "text.txt")
    spec = job("loading:Program", str(data), source=str(PROGRAMS))
    spec["params"]["folder"] = str(folder)
    planned = cluster.pipectl("plan", cluster.write(spec))
    assert "MiB) is built in every worker, one of a node at a time, because it starts threads" in planned.stdout
    assert "with `weights:` each stage would read its own values only" in planned.stdout
    ended = cluster.run(spec)
    assert cluster.losses(ended.job_id) == plain(folder, data, from_files=True)


def test_mistakes_are_told_before_anything_starts(cluster, tmp_path):
    folder = hub.write_model(tmp_path / "model", "llama", weights_seed=3)
    data = str(hub.write_text(tmp_path / "text.txt"))

    def told(spec, command="plan"):
        done = cluster.pipectl(command, cluster.write(spec))
        assert done.returncode == 2, done
        return done.stderr

    assert "relative, so it is looked for in `source`, which is not given" in told(job("hf:./model", data))
    assert '"nowhere" is no absolute path' in told(job(f"hf:{folder}", data, weights="nowhere"))
    assert "init: Input should be 'auto', 'stream' or 'per_op'" in told(job(f"hf:{folder}", data, init="drawn"))
    other = hub.write_model(tmp_path / "other", "llama", num_hidden_layers=3)
    refused = told(job(f"hf:{other}", data, weights=str(folder)), "submit")
    assert f"weights: {folder} lacks 9 of the" in refused and "model.layers.2." in refused
    planned = cluster.pipectl("plan", cluster.write(job(f"hf:{folder}", data)))
    assert f"start values: read from {folder}, each stage its own tensors" in planned.stdout
