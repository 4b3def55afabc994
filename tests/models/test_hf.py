"""A transformers directory as a program: inputs, targets and losses of each kind of language model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stagekit.errors import UserError
from stagekit.load import load_program
from tests.support import hub

KINDS = ["gpt2", "llama", "bert", "t5"]


def _data(folder: Path, kind: str) -> str:
    if kind != "t5":
        return str(hub.write_text(folder / "text.txt", words=400))
    lines = [{"source": " ".join(hub.WORDS[i % 7 :]), "target": " ".join(hub.WORDS[: 1 + i % 5])} for i in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "pairs.jsonl")


def _program(folder: Path, kind: str, *, weights_seed: int | None = 5, **params: Any) -> Any:
    hub.write_model(folder / "model", kind, weights_seed=weights_seed)
    given = {"data": _data(folder, kind), "sequence": 16, "batch": 8, **params}
    program = load_program(f"hf:{folder / 'model'}", given)
    program.chunks = 2
    return program


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_targets_give_the_loss_that_transformers_computes(kind: str, tmp_path: Path) -> None:
    program = _program(tmp_path, kind)
    batch = next(program.batches(0, 0, 1))
    import transformers

    model = getattr(transformers, hub.config(kind).architectures[0]).from_pretrained(tmp_path / "model")
    with torch.no_grad():
        ours = float(program.loss(model(**batch.kwargs), batch.target))
        inputs = {**batch.kwargs, "labels": batch.target}
        if kind in ("gpt2", "llama"):  # its own loss shifts, ours came shifted
            inputs["labels"] = torch.cat([batch.kwargs["input_ids"][:, :1], batch.target], 1)
            inputs["input_ids"] = torch.cat([batch.kwargs["input_ids"], batch.target[:, -1:]], 1)
        inputs.pop("decoder_input_ids", None)  # made of the labels
        assert ours == pytest.approx(float(model(**inputs).loss), rel=1e-5)
    example = program.example_inputs()[1]
    assert {n: v.shape[1:] for n, v in example.items()} == {n: v.shape[1:] for n, v in batch.kwargs.items()}
    assert {n: v.dtype for n, v in example.items()} == {n: v.dtype for n, v in batch.kwargs.items()}
    assert isinstance(program.build_model(), type(model)) and program.build_model().training


@pytest.mark.parametrize("kind", KINDS)
def test_batches_resume_at_any_step_and_replicas_share_them(kind: str, tmp_path: Path) -> None:
    program = _program(tmp_path, kind)
    stream = program.batches(0, 0, 1)
    third = [next(stream) for _ in range(3)][2]
    again = next(program.batches(2, 0, 1))
    shares = [next(program.batches(2, replica, 3)) for replica in range(3)]
    for name, value in third.kwargs.items():
        assert torch.equal(again.kwargs[name], value)
        assert torch.equal(torch.cat([share.kwargs[name] for share in shares]), value)
    assert torch.equal(torch.cat([share.target for share in shares]), third.target)


def test_only_tokens_that_count_weigh(tmp_path: Path) -> None:
    program = _program(tmp_path, "llama", pack=False)
    program.files = [tmp_path / "lines.jsonl"]
    program.files[0].write_text("\n".join(json.dumps({"text": "the cat" + " sat" * i}) for i in range(6)))
    batch = next(program.batches(0, 0, 1))
    assert program.loss_weight(batch.target) == float((batch.target != -100).sum()) < batch.target.numel() / 2
    nothing = torch.full_like(batch.target, -100)
    logits = torch.zeros(*nothing.shape, 32)
    assert float(program.loss(type("Output", (), {"logits": logits}), nothing)) == 0.0


def test_masked_models_predict_about_15_percent(tmp_path: Path) -> None:
    batch = next(_program(tmp_path, "bert", batch=20).batches(0, 0, 1))
    predicted = batch.target != -100
    assert 0.08 < predicted.float().mean() < 0.25
    assert (batch.kwargs["input_ids"][predicted] == 3).float().mean() > 0.6, "most of them show the mask token"


def test_a_directory_without_weights_starts_from_the_seed_and_a_plan_says_so(tmp_path: Path) -> None:
    program = _program(tmp_path, "gpt2")
    assert program.weights is not None and program.warnings == []
    (tmp_path / "model" / "model.safetensors").unlink()
    assert program.weights is None
    assert program.warnings == [f"no weights (*.safetensors) in {tmp_path}/model: the model starts at random"]


def test_rates_warm_up_and_decay_to_zero(tmp_path: Path) -> None:
    program = _program(tmp_path, "gpt2", warmup_steps=3, lr_schedule="cosine", decay_steps=13, learning_rate=1.0)
    optimizer = program.optimizer([("w", torch.nn.Parameter(torch.zeros(2, 2)))])
    scheduler = program.scheduler(optimizer)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[8] == pytest.approx(0.5) and rates[13] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("llama", {"sequence": 64}, r"params\.sequence is 64, but the model in .* takes at most 32"),
        ("llama", {"lr_schedule": "linear"}, r"params\.decay_steps is 0: linear needs the step"),
        ("llama", {"lr_schedule": "step"}, r"params\.lr_schedule is 'step'; use one of constant"),
        ("llama", {"dtype": "int8"}, r"params\.dtype is 'int8'"),
        ("llama", {"task": "chat"}, r"params\.task is 'chat'; use auto, causal"),
        ("llama", {"task": ["causal"]}, r"params\.task is \['causal'\]; use auto, causal"),
        ("llama", {"task": "masked"}, "task is 'masked', but .* names LlamaForCausalLM, a model for 'causal'; leave"),
        ("bert", {"task": "causal"}, "task is 'causal', but .* names BertForMaskedLM, a model for 'masked'"),
        ("llama", {"lr": 1}, r"params\.lr: there is no such parameter; Program takes data, task, sequence, .*"),
        (
            "llama",
            {"sequenc": 1},
            r'params\.sequenc: there is no such parameter; did you mean "sequence"\? Program takes',
        ),
        ("llama", {"source_dir": "x"}, r"params\.source_dir: the folder of an hf: program stands in `program`"),
        ("llama", {"batch": 0}, r"params\.batch is 0; give rows of a step"),
        ("llama", {"learning_rate": "2e-5"}, r"params\.learning_rate is '2e-5'; .* YAML reads 2e-5 as text"),
        ("llama", {"warmup_steps": -1}, r"params\.warmup_steps is -1; give steps"),
        ("llama", {"pack": "no"}, r"params\.pack is 'no'; give true or false"),
        ("llama", {"seed": -1}, r"params\.seed is -1"),
    ],
)
def test_params_that_can_not_be_are_refused(kind: str, params: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        _program(tmp_path, kind, weights_seed=None, **params)


def test_directories_that_are_no_language_model_are_refused(tmp_path: Path) -> None:
    folder = hub.write_model(tmp_path / "model", "bert")
    document = json.loads((folder / "config.json").read_text())
    changes: dict[str, Any] = {
        "BertForSequenceClassification, which is no language model": {
            "architectures": ["BertForSequenceClassification"]
        },
        "brings code of its own, which is not run": {"auto_map": {"AutoModel": "x.Y"}},
        "is no configuration that transformers knows": {"model_type": "unheard_of"},
        "has 24 tokens, the model 10": {"vocab_size": 10},
        r"architectures is 'BertForMaskedLM'; write a list": {"architectures": "BertForMaskedLM"},
        "'hidden_size' expected int, got str": {"hidden_size": "48"},
    }
    for told, change in changes.items():
        (folder / "config.json").write_text(json.dumps(document | change))
        with pytest.raises(UserError, match=told):
            load_program(f"hf:{folder}", {"data": "/x.txt", "sequence": 16})
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForMaskedLM"]}))
    with pytest.raises(UserError, match="is a ViTConfig and has no vocab_size"):
        load_program(f"hf:{folder}", {"data": "/x.txt", "sequence": 16})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"has no tokenizer \(none of tokenizer\.json"):
        load_program(f"hf:{folder}", {"data": "/x.txt", "sequence": 16})
    with pytest.raises(UserError, match=r"has no config\.json on this node"):
        load_program(f"hf:{tmp_path}", {"data": "/x.txt"})
    with pytest.raises(UserError, match="is relative, but the job has no `source`"):
        load_program("hf:model", {"data": "/x.txt"})


def test_a_wished_task_needs_a_class_of_transformers_that_does_it(tmp_path: Path) -> None:
    for kind, task, told in [
        ("t5", "masked", r"no such model of a T5Config; it has: seq2seq$"),
        (
            "bert",
            "causal",
            r"no such model of a BertConfig; it has: masked$",
        ),  # each token would see the one to predict
    ]:
        folder = hub.write_model(tmp_path / kind, kind)
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | {"architectures": None}))
        with pytest.raises(UserError, match=told):
            load_program(f"hf:{folder}", {"data": "/x.txt", "sequence": 16, "task": task})


def test_files_that_git_lfs_has_not_fetched_are_told_apart_from_damaged_ones(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("config.json", "tokenizer.json"):
        folder = hub.write_model(tmp_path / name, "llama")
        (folder / name).write_text(pointer)
        with pytest.raises(UserError, match=rf"{name} is a git-lfs pointer .*; run `git lfs pull` in {folder}"):
            load_program(f"hf:{folder}", {"data": "/x.txt", "sequence": 16})


def test_what_a_trainer_leaves_beside_the_model_is_not_its_weights(tmp_path: Path) -> None:
    program = _program(tmp_path, "llama", weights_seed=None)
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.bin"):
        (program.folder / name).write_bytes(b"")
    assert program.weights is None
    (program.folder / "pytorch_model.bin").write_bytes(b"")
    assert program.weights == program.folder, "refused later, with what to do, rather than started anew"


def test_without_transformers_the_job_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from stagekit.load import load_program\n"
        f"load_program('hf:{tmp_path}', {{'data': '/x.txt'}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "needs transformers where the job is planned and in every worker's interpreter" in done.stderr


def test_data_that_can_not_be_read_is_told_by_the_plan(tmp_path: Path) -> None:
    program = _program(tmp_path, "llama", weights_seed=None)
    program.check_data()
    absent = _program(tmp_path, "llama", weights_seed=None, data=str(tmp_path / "absent.txt"))
    with pytest.raises(UserError, match=r"params\.data: can't read .*absent\.txt on this node"):
        absent.check_data()


def test_documents_without_a_token_to_predict_make_no_rows(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": ""}\n{"text": "some words of a text"}\n')
    program = _program(tmp_path, "llama", weights_seed=None, data=str(tmp_path / "docs.jsonl"), pack=False, batch=4)
    batch = next(program.batches(0, 0, 1))
    assert ((batch.target != -100).sum(1) > 0).all()
