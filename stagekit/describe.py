"""A process that plans a job: build, capture, self-check, cut, schedule → one JSON document on stdout.

`python -m stagekit.describe < spec.json`: the spec is a job file as a plain dict (pipeapi.jobspec.to_dict). pipectl runs it
for `plan`, `validate --deep` and before `submit`, where torch is installed, so that mistakes in a program are told
before anything starts. Output: {"ok": true, "plan": {…}, "picture": "…"} or {"ok": false, "error": "…", "where": "…",
"traceback": "…"}; what the program prints goes to stderr. Exit status 0 in both cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from stagekit.api import capture_model, plan_pipeline
from stagekit.errors import ScheduleError, SplitError, StagekitError, UserError, WeightsError
from stagekit.graph.compile.compilers import check_backend
from stagekit.load import load_program
from stagekit.run.allocator import keep_freed_memory


def plan_job(spec: dict[str, Any], source_dir: str | None, *, quick: bool) -> dict[str, Any]:
    """Return the document for a job that can be planned. `quick` cuts by parameters instead of measuring."""
    program = load_program(spec["program"], spec["params"], source_dir)
    pipeline, seed = spec["pipeline"], spec["train"]["seed"]
    program.chunks, program.replicas = pipeline["chunks"], pipeline["replicas"]
    if hasattr(program, "check_data"):
        program.check_data()
    args, kwargs = program.example_inputs()
    check_backend(pipeline["compile"])
    captured = capture_model(
        program.build_model,
        args,
        kwargs,
        seed=seed,
        init="" if spec["init"] == "auto" else spec["init"],
        weights=spec["weights"] or getattr(program, "weights", None),
    )
    split = "parameters" if quick and pipeline["split"] == "balanced" else pipeline["split"]
    pipe = plan_pipeline(
        captured,
        loss_fn=program.loss,
        stages=pipeline["stages"],
        chunks=pipeline["chunks"],
        schedule=pipeline["schedule"],
        split=split,
        stages_per_rank=pipeline["stages_per_rank"],
        replicas=pipeline["replicas"],
        buckets=pipeline["buckets"],
        compile=pipeline["compile"],
        recompute=pipeline["recompute"],
        seed=seed,
        measured=not quick,
    )
    return {"ok": True, "plan": json.loads(pipe.plan.to_json()), "picture": str(pipe.plan)}


_NEEDED = ("program", "params", "pipeline", "train", "init", "weights")

# Which field of the job file an error is about.
_FIELDS: dict[type[Exception], str] = {
    SplitError: "pipeline.split",
    ScheduleError: "pipeline.schedule",
    WeightsError: "weights",
}


def failure(error: BaseException) -> dict[str, Any]:
    """Return the document for a job that can't be planned: the message, and the user's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).resolve().parent)
    own = [f for f in frames if not f.filename.startswith(here) and os.sep + "torch" + os.sep not in f.filename]
    own = [f for f in own if not f.filename.startswith("<")]
    text = str(error) if isinstance(error, StagekitError) else f"{type(error).__name__}: {error}"
    field = next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), "program")
    if (isinstance(error, WeightsError) and "is not there" in text) or "on this node: " in text:
        text += "; where only the nodes have it, pipectl submit --no-check leaves this to them"
    return {
        "ok": False,
        "field": field,
        "error": text.removeprefix(f"{field}: "),
        "where": f"{own[-1].filename}:{own[-1].lineno}" if own else "",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _read_spec() -> dict[str, Any]:
    try:
        spec = json.loads(sys.stdin.buffer.read())
    except ValueError as error:
        raise UserError(f"the spec on stdin is no JSON: {error}") from error
    missing = [name for name in _NEEDED if not isinstance(spec, dict) or name not in spec]
    if missing:
        raise UserError(f"the spec on stdin lacks {', '.join(missing)}; give a whole job (pipeapi.jobspec.to_dict)")
    return dict(spec)


def main() -> int:
    """Read a spec from stdin, write one JSON document to stdout."""
    parser = argparse.ArgumentParser(prog="python -m stagekit.describe", description="Plan a job.")
    parser.add_argument("--source", help="folder that goes first on the import path")
    parser.add_argument("--quick", action="store_true", help="check only: no costs are measured")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # costs are measured as workers run
    with contextlib.redirect_stdout(sys.stderr):
        try:
            document = plan_job(_read_spec(), flags.source, quick=flags.quick)
        except Exception as error:
            document = failure(error)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
