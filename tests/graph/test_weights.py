"""Weights from files: every stage reads its own tensors, and what does not fit is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stagekit.errors import WeightsError
from stagekit.graph.capture.capture import capture
from stagekit.graph.values.build import Start, open_model
from stagekit.graph.values.weight_files import StoredTensor
from stagekit.run import checkpoint


class Tied(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(90, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, 90, bias=False)
        self.head.weight = self.body[0].weight
        self.register_buffer("table", torch.arange(64.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.table)


def _state(seed: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Tied().state_dict().items()}


def _without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


def _single(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def _sharded(folder: Path, state: dict[str, Tensor]) -> Path:
    shards = {f"part-{i}.safetensors": names for i, names in enumerate((list(state)[:3], list(state)[3:]))}
    for file, names in shards.items():
        save_file({name: state[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _checkpoint(folder: Path, state: dict[str, Tensor]) -> Path:
    facts = {"aliases": [["head.weight", "body.0.weight"]]}
    return checkpoint.save(
        folder,
        _without(state, "head.weight"),
        step=5,
        fence=1,
        rank=0,
        shard_ranks=[0],
        barrier=lambda: None,
        facts=facts,
    )


STORES: dict[str, Callable[[Path], Path]] = {
    "one file": lambda folder: _single(folder, _state()),
    "a folder with one file": lambda folder: _single(folder, _state()).parent,
    "shards with an index": lambda folder: _sharded(folder, _state()),
    "the index itself": lambda folder: _sharded(folder, _state()) / "model.safetensors.index.json",
    "a checkpoint of ours": lambda folder: _checkpoint(folder, _state()),
    "a tied weight under its first name": lambda folder: _single(folder, _without(_state(), "head.weight")),
    "a tied weight under its other name": lambda folder: _single(folder, _without(_state(), "body.0.weight")),
    "half precision": lambda folder: _single(
        folder, {n: v.half() if v.is_floating_point() else v for n, v in _state().items()}
    ),
    "wrapped in DistributedDataParallel": lambda folder: _single(
        folder, {f"module.{name}": value for name, value in _state().items()}
    ),
    "without the base model's prefix": lambda folder: _single(
        folder, {name.removeprefix("body."): value for name, value in _state().items()}
    ),
    "with masks that older versions saved": lambda folder: _single(
        folder, _state() | {"h.0.attn.bias": torch.ones(4, 4), "table": torch.zeros(64)}
    ),
}


@pytest.mark.parametrize("store", STORES)
def test_values_come_from_files_and_the_rest_from_the_constructor(store: str, tmp_path: Path) -> None:
    module, source = open_model(Tied, 0, Start(weights=STORES[store](tmp_path)))
    state = _state()
    values = source.take(["body.0.weight", "head.weight", "body.2.num_batches_tracked", "table"])
    tolerance = 1e-3 if store == "half precision" else 0.0
    assert torch.allclose(values["body.0.weight"], state["body.0.weight"], rtol=tolerance, atol=tolerance)
    assert torch.equal(values["head.weight"], values["body.0.weight"])
    assert torch.equal(values["table"], torch.arange(64.0))
    assert all(values[name].dtype == dict(module.state_dict())[name].dtype for name in ("head.weight",))
    assert "each stage its own tensors" in source.note


def test_a_stage_reads_only_what_it_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))
    path = _single(tmp_path, model.state_dict())
    build = lambda: nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))  # noqa: E731
    cut = capture(build, (torch.zeros(2, 70),), start=Start(weights=path)).cut(["1", "2", "3"], 4)
    read: list[str] = []
    plain = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: read.append(self.key) or plain(self))
    stage = cut.stage_module(2)
    assert read == ["2.weight", "2.bias"]
    assert torch.equal(stage.get_parameter("2.weight"), model[2].weight)
    assert str(path) in cut.spec.start_values


MISFITS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (
        lambda folder: _single(folder, _without(_state(), "body.1.bias") | {"body.1.bais": torch.ones(64)}),
        r"lacks 1 of the 9 tensors of Tied: body\.1\.bias \(close: body\.1\.bais\)",
    ),
    "left over": (
        lambda folder: _single(folder, _state() | {"body.3.weight": torch.ones(2)}),
        r"holds 1 tensors that Tied does not have: body\.3\.weight \(close: body\.",
    ),
    "another shape": (
        lambda folder: _single(folder, _state() | {"body.1.bias": torch.ones(65)}),
        r"body\.1\.bias is \[65\] in .*model\.safetensors, but \[64\] in the model",
    ),
    "another kind": (
        lambda folder: _single(folder, _state() | {"body.1.bias": torch.ones(64, dtype=torch.int64)}),
        r"body\.1\.bias is I64 in .*, but float32 in the model",
    ),
    "not there": (lambda folder: folder / "absent", r"absent is not there on this node \(.*\); every node needs it"),
    "an empty folder": (lambda folder: folder, "is no .*and holds none"),
    "a pickle": (lambda folder: _touch(folder / "pytorch_model.bin").parent, r"pickle \(pytorch_model\.bin\).*convert"),
    "cut short": (lambda folder: _cut_short(_single(folder, _state())), r"model\.safetensors on .* is damaged"),
    "left by git-lfs": (
        lambda folder: _pointer(_single(folder, _state())),
        r"model\.safetensors on .* is a git-lfs pointer in place of the weights; run `git lfs pull` in ",
    ),
    "an index left by git-lfs": (
        lambda folder: _pointer(folder / "model.safetensors.index.json"),
        r"index\.json on .* is a git-lfs pointer in place",
    ),
    "a trainer's arguments": (lambda folder: _touch(folder / "training_args.bin").parent, "and holds none"),
    "an index without a shard": (
        lambda folder: _remove(_sharded(folder, _state()), "part-1.safetensors"),
        r"names part-1\.safetensors, which is not in",
    ),
    "a checkpoint cut short": (
        lambda folder: _cut_short(_checkpoint(folder, _state()) / "rank_0.safetensors").parent,
        r"rank_0\.safetensors is missing or damaged",
    ),
    "a folder of checkpoints": (
        lambda folder: _checkpoint(folder, _state()).parent,
        r"holds 1 checkpoints; name one, the last is .*step_5\.1",
    ),
    "two files": (
        lambda folder: (
            _single(_single(folder, _state()).rename(folder / "b.safetensors").parent, _state())
            .rename(folder / "a.safetensors")
            .parent
        ),
        r"holds 2 files \(a\.safetensors, b\.safetensors",
    ),
}


def _touch(file: Path) -> Path:
    file.write_bytes(b"")
    return file


def _pointer(file: Path) -> Path:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    return file


def _cut_short(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-10])
    return file


def _remove(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_starts(case: str, tmp_path: Path) -> None:
    make, expected = MISFITS[case]
    with pytest.raises(WeightsError, match=expected):
        open_model(Tied, 0, Start(weights=make(tmp_path)))


def test_a_view_of_a_loaded_parameter_is_refused(tmp_path: Path) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(80, 80)
            self.shown = self.layer.weight.detach()[:4]

    _, source = open_model(Viewing, 0, Start(weights=_single(tmp_path, nn.Sequential().state_dict() | _layer())))
    with pytest.raises(WeightsError, match=r"shown shares memory with layer\.weight"):
        source.take(["shown"])


def _layer() -> dict[str, Tensor]:
    return {"layer.weight": torch.ones(80, 80), "layer.bias": torch.ones(80)}
