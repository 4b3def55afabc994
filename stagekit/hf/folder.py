"""What a transformers directory holds: its configuration, the task it is trained for, its tokenizer, whether weights.

Decides what is refused of a directory, and says why in its own words; files that git-lfs has not fetched are told apart
from damaged ones. Called by stagekit.hf.program alone; transformers is imported in here and there only, since only such
jobs need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagekit.errors import UserError
from stagekit.graph.values.weight_files import INDEX_ENDS, holds_pickled_weights, is_lfs_pointer

TASKS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def read_config(folder: Path) -> Any:
    """Return the directory's configuration, without a cache of keys and values. Raises UserError."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError(
            "program: hf: needs transformers where the job is planned and in every worker's interpreter; "
            "pip install 'pipectl[hf]'"
        ) from error
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"program: hf:{folder} has no config.json on this node; name a transformers model directory")
    _refuse_pointer(file)
    try:
        document = json.loads(file.read_text())
        if "auto_map" in document:
            raise UserError(f"the model in {folder} brings code of its own, which is not run; write a program for it")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # transformers checks each model's fields in its own way
        raise UserError(f"{file} is no configuration that transformers knows: {_told(error)}") from error
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f'{file}: architectures is {names!r}; write a list of one class: ["LlamaForCausalLM"]')
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise UserError(
            f"{file} is a {type(config).__name__} and has no vocab_size: it is no language model, or holds several "
            "models in one; write a program for it"
        )
    config.use_cache = False
    return config


def architecture(config: Any) -> str:
    """Return the class that the configuration names, or an empty text."""
    return next(iter(config.architectures or ()), "")


def task_of(config: Any, folder: Path, wish: Any) -> str:
    """Return the task that `params.task` and the configuration agree on. Raises UserError where they do not."""
    if wish != "auto" and wish not in list(TASKS):  # a list has no hash
        raise UserError(f"params.task is {wish!r}; use auto, {', '.join(TASKS)}")
    name = architecture(config)
    own = task_of_name(name, bool(config.is_encoder_decoder))
    if wish == "auto" and own is None:
        raise UserError(
            f"{folder}/config.json names {name or 'no architecture'}, which is no language model that this version trains; "
            f"set params.task to one of {', '.join(TASKS)}, or write a program"
        )
    task = own if wish == "auto" else str(wish)
    assert task is not None
    if own is not None and task != own:
        raise UserError(
            f"params.task is {task!r}, but {folder}/config.json names {name}, a model for {own!r}; leave params.task out"
        )
    if not _has_class(config, task):
        able = [other for other in TASKS if _has_class(config, other)]
        raise UserError(
            f"params.task is {task!r}, but transformers has no such model of a {type(config).__name__}; "
            f"it has: {', '.join(able) or 'none that this version trains'}"
        )
    return task


def _has_class(config: Any, task: str) -> bool:
    import transformers

    if task == "causal" and not config.is_encoder_decoder and _is_in("masked", config, transformers):
        return bool(getattr(config, "is_decoder", False)) and _is_in(task, config, transformers)  # else it sees ahead
    return _is_in(task, config, transformers)


def _is_in(task: str, config: Any, transformers: Any) -> bool:
    return type(config) in getattr(transformers, TASKS[task])._model_mapping


def task_of_name(name: str, is_encoder_decoder: bool) -> str | None:
    """Return the task that a class called `name` is for; None: none of these."""
    if name.endswith("ForMaskedLM"):
        return "masked"
    if is_encoder_decoder and name.endswith(("ForConditionalGeneration", "ForSeq2SeqLM")):
        return "seq2seq"
    return "causal" if name.endswith(("ForCausalLM", "LMHeadModel")) and not is_encoder_decoder else None


def read_tokenizer(folder: Path) -> Any:
    """Return the directory's tokenizer. Raises UserError."""
    from transformers import AutoTokenizer

    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    if not present:  # transformers would make an empty one
        raise UserError(f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    for file in present:
        _refuse_pointer(file)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each tokenizer reads its files in its own way
        raise UserError(f"{folder} has no tokenizer that can be loaded: {_told(error)}") from error


def holds_weights(folder: Path) -> bool:
    """Tell whether the directory holds weights, also those that will be refused: starting anew silently would be worse."""
    files = list(folder.iterdir())
    return any(file.name.endswith((".safetensors", INDEX_ENDS)) for file in files) or holds_pickled_weights(files)


def _refuse_pointer(file: Path) -> None:
    if is_lfs_pointer(file):
        raise UserError(f"{file} is a git-lfs pointer in place of the file; run `git lfs pull` in {file.parent}")


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
