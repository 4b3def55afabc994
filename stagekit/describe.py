"""A process that plans a job: build, capture, self-check, cut, schedule → one JSON document on stdout.

`python -m stagekit.describe < spec.json`: the spec is a job file as a plain dict (pipeapi.jobproto.to_dict). pipectl runs it
for `plan`, `validate --deep` and before `submit`, where torch is installed, so that mistakes in a program are told
before anything starts. Output: {"ok": true, "plan": {…}, "picture": "…"} or {"ok": false, "error": "…", "where": "…",
"traceback": "…"}; what the program prints goes to stderr. Exit status 0 in both cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import ScheduleError, SplitError, StagekitError, UserError, WeightsError
from stagekit.graph.capture.precision import FP32
from stagekit.graph.compile.compilers import check_backend
from stagekit.load import check_evaluation, check_mode, load_program, schedule_file
from stagekit.plan.plan import Plan, check_per_rank
from stagekit.plan.planner.candidates import AUTO
from stagekit.plan.planner.report import as_document
from stagekit.plan.split import Balanced, check_split, split_of
from stagekit.planning import Question, chunks_to_compare, compared, ranks_of
from stagekit.run.allocator import keep_freed_memory


def plan_job(spec: dict[str, Any], source_dir: str | None, *, quick: bool) -> dict[str, Any]:
    """Return the document for a job that can be planned. `quick` cuts by parameters instead of measuring."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = schedule_file(spec["pipeline"], Path(folder))
        return _plan_job({**spec, "pipeline": {**spec["pipeline"], "schedule": schedule}}, source_dir, quick=quick)


def _plan_job(spec: dict[str, Any], source_dir: str | None, *, quick: bool) -> dict[str, Any]:
    program = load_program(spec["program"], spec["params"], source_dir)
    pipeline, seed = spec["pipeline"], spec["train"]["seed"]
    ranks = ranks_of(pipeline)
    is_open, given = pipeline["chunks"] == AUTO, pipeline["chunks"]
    program.chunks, program.replicas = ranks if is_open else given, pipeline["replicas"]
    check_evaluation(program, spec["train"].get("eval_every") or 0)
    if hasattr(program, "check_data"):
        program.check_data()
    args, kwargs = program.example_inputs()
    check_backend(pipeline["compile"])
    split = split_of(pipeline)
    per_rank = check_per_rank(
        pipeline["schedule"], pipeline["stages"], pipeline["stages_per_rank"], pipeline["replicas"]
    )
    check_split(split, pipeline["stages"], per_rank)
    scores = check_mode(program, pipeline["schedule"])
    captured = capture_model(
        program.build_model,
        args,
        kwargs,
        seed=seed,
        init="" if spec["init"] == "auto" else spec["init"],
        weights=spec["weights"] or getattr(program, "weights", None),
        forward_only=scores,
        precision=spec["train"].get("precision") or FP32,
    )
    if quick and isinstance(split, Balanced) and split.costs == "measured":  # what fits a cap needs no costs
        split = "parameters" if split.memory_bytes is None else replace(split, costs="bytes")
    pipe = plan_pipeline(
        captured,
        loss_fn=getattr(program, "loss", None),
        stages=pipeline["stages"],
        chunks=chunks_to_compare(captured, ranks, ranks) if is_open else given,
        example_chunks=program.chunks,
        tables="modulo",
        schedule=pipeline["schedule"],
        split=split,
        stages_per_rank=per_rank,
        replicas=pipeline["replicas"],
        buckets=pipeline["buckets"],
        compile=pipeline["compile"],
        recompute=pipeline["recompute"],
        seed=seed,
        measured=not quick,
    )
    told = getattr(program, "warnings", ())  # hf: programs have some; of another class it may be anything
    warnings = [str(text) for text in told] if isinstance(told, list) and not spec["weights"] else []
    picture = "\n".join([str(pipe.plan), *training_notes(spec["train"], pipe.plan)])
    document = {"ok": True, "plan": json.loads(pipe.plan.to_json()), "picture": picture, "warnings": warnings}
    if not quick and pipe.plan.trains:
        question = Question(
            split,
            pipeline["stages"],
            None,
            chunks=pipe.plan.num_chunks,
            recompute=pipe.plan.recompute,
            compiled=pipe.plan.compile != "eager",
        )
        document["ranking"] = as_document(pipe.ranking or compared(captured, question, pipe.plan, pipe.node_costs))
    return document


def training_notes(train: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return what `train` makes of the plan's numbers, which are one batch's, and of its equality to the bit."""
    notes: list[str] = []
    batches, precision = int(train.get("accumulate") or 1), train.get("precision") or FP32
    if batches > 1:
        batch_ms = plan.timeline.makespan * 1e3
        notes.append(
            f"times are those of one batch; a step is {batches} of them (train.accumulate): {batches * batch_ms:.1f} ms"
        )
    if precision != FP32:
        notes.append(
            f"bit-equal says whether losses and weights are those of one process under the same {precision} autocast"
        )
    return notes


_NEEDED = ("program", "params", "pipeline", "train", "init", "weights")

# Which field of the job file an error is about: by its type, or by the name that its text begins with.
_FIELDS: dict[type[Exception], str] = {SplitError: "pipeline.split", ScheduleError: "pipeline.schedule"}
_SCHEDULE_FILE = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^/\s]+/([^/\s]+\.csv)", re.IGNORECASE)
_NAMED = re.compile(r"(params(?:\.\w+)?)(?:: | is |(?= ))")


def _field_and_text(error: BaseException, spec: Mapping[str, Any]) -> tuple[str, str]:
    text = str(error) if isinstance(error, StagekitError) else f"{type(error).__name__}: {error}"
    text = _SCHEDULE_FILE.sub(r"\1", text)
    if isinstance(error, WeightsError):  # an hf: program's own are in its folder
        return "weights" if spec.get("weights") else "program", text.removeprefix("weights: ")
    if isinstance(error, UserError) and text.startswith("compile="):
        return "pipeline.compile", text
    if isinstance(error, UserError) and (named := _NAMED.match(text)):
        return named[1], text[named.end() :].lstrip()
    if isinstance(error, UserError) and text.startswith("chunks: "):
        return "pipeline.chunks", text.removeprefix("chunks: ")
    if isinstance(error, SplitError) and "memory cap" in text:
        return "pipeline.balance.memory", text
    field = next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), "program")
    return field, text.removeprefix(f"{field}: ")


def failure(error: BaseException, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document for a job that can't be planned: the field, the message, and the user's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).resolve().parent)
    own = [f for f in frames if not f.filename.startswith(here) and os.sep + "torch" + os.sep not in f.filename]
    own = [f for f in own if not f.filename.startswith("<") and not _is_of_python(f.filename)]
    field, text = _field_and_text(error, spec)
    if (isinstance(error, WeightsError) and "is not there" in text) or "on this node: " in text:
        text += "; where only the nodes have it, pipectl submit --no-check leaves this to them"
    return {
        "ok": False,
        "field": field,
        "error": text,
        "where": f"{own[-1].filename}:{own[-1].lineno}" if own else "",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _is_of_python(filename: str) -> bool:
    return filename.startswith(sysconfig.get_paths()["stdlib"] + os.sep) and "site-packages" not in filename


def _read_spec() -> dict[str, Any]:
    try:
        spec = json.loads(sys.stdin.buffer.read())
    except ValueError as error:
        raise UserError(f"the spec on stdin is no JSON: {error}") from error
    missing = [name for name in _NEEDED if not isinstance(spec, dict) or name not in spec]
    if missing:
        raise UserError(f"the spec on stdin lacks {', '.join(missing)}; give a whole job (pipeapi.jobproto.to_dict)")
    return dict(spec)


def main() -> int:
    """Read a spec from stdin, write one JSON document to stdout."""
    parser = argparse.ArgumentParser(prog="python -m stagekit.describe", description="Plan a job.", allow_abbrev=False)
    parser.add_argument("--source", help="folder that goes first on the import path")
    parser.add_argument("--quick", action="store_true", help="check only: no costs are measured")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # costs are measured as workers run
    with contextlib.redirect_stdout(sys.stderr):
        spec: dict[str, Any] = {}
        try:
            spec = _read_spec()
            document = plan_job(spec, flags.source, quick=flags.quick)
        except Exception as error:
            document = failure(error, spec)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
