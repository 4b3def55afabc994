"""`python -m stagekit.plan`: the lists of a schedule, verified and timed, without a model.

Exit status: 0; 1 for a schedule that is bad or deadlocks (the grid is on stderr); 2 for a request that can't be served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stagekit.errors import ScheduleError
from stagekit.plan.actions import COMPUTE, to_csv
from stagekit.plan.costs import Costs
from stagekit.plan.lowering import Window
from stagekit.plan.pictures import chrome_trace, gantt, svg
from stagekit.plan.schedules import csv_file
from stagekit.plan.schedules.registry import AUTOMATIC, NAMES, SCHEDULES, is_file, table_for
from stagekit.plan.schedules.tables import block_placement
from stagekit.plan.transports import Transport
from stagekit.plan.trial import Trial, try_lists, try_schedule


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.schedule and options.load:
            raise ValueError("--schedule and --load: give one of them")
        if options.width < 1:
            raise ValueError(f"--width {options.width}: at least 1 character")
        if options.schedule and is_file(options.schedule):
            options.load = options.schedule
        trial = _load(options) if options.load else _generate(options)
    except _BadListsError as error:
        print(f"bad schedule: {error}", file=sys.stderr)
        return 1
    except (ScheduleError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if trial.deadlock:
        print(f"bad schedule: {trial.refusal}", file=sys.stderr)
    try:
        _show(trial, options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has enough
        sys.stderr.close()
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 1 if trial.deadlock else 0


class _BadListsError(Exception):
    """Lists of the user's that are no valid schedule."""


def _generate(options: argparse.Namespace) -> Trial:
    schedule = options.schedule
    if schedule == "auto":
        raise ValueError(
            "--schedule auto chooses on what a model was measured to cost: pipectl plan job.yaml, or stagekit.pipeline(…, "
            'schedule="auto"); here, try each with --forward, --input-grad, --weight-grad and --hop'
        )
    each = options.stages_per_rank
    if each is not None and "," in each and options.ranks is None:
        options.ranks = each.count(",") + 1
    if not schedule or options.chunks is None or (options.ranks is None and not options.placement):
        raise ValueError("give --schedule, --ranks and --chunks, or --load FILE.csv")
    if options.memory_limit is not None and schedule != AUTOMATIC:
        raise ValueError(f"--memory-limit is for {AUTOMATIC}, which searches below it; {schedule} holds what it holds")
    table = _table(options)
    return try_schedule(
        schedule,
        table,
        options.chunks,
        _costs(options, len(table)),
        transport=Transport(options.transport),
        memory_limit=None if options.memory_limit is None else _number("--memory-limit", options.memory_limit),
        window=_window(options.window),
    )


def _table(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the rank of each stage."""
    schedule, each = options.schedule, options.stages_per_rank
    if options.placement:
        if each is not None:
            raise ValueError("--placement says how many stages each rank has; leave --stages-per-rank out")
        table = tuple(_integers("--placement", options.placement))
        if options.ranks not in (None, max(table) + 1):
            raise ValueError(
                f"--placement {options.placement} is for {max(table) + 1} ranks, but --ranks is {options.ranks}"
            )
        return table
    if each is None:
        numbers = [SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1]
    else:
        numbers = _integers("--stages-per-rank", each, "give a number, or one for each rank with commas between: 2,1")
    if min(*numbers, options.ranks) < 1:
        raise ValueError(f"--ranks {options.ranks}, --stages-per-rank {each}: each is at least 1")
    if len(numbers) == 1:
        return table_for(schedule, numbers[0] * options.ranks, options.ranks)
    if len(numbers) != options.ranks:
        raise ValueError(f"--stages-per-rank {each} is for {len(numbers)} ranks, but --ranks is {options.ranks}")
    return block_placement(numbers)


def _load(options: argparse.Namespace) -> Trial:
    if not Path(options.load).is_file():
        raise ValueError(f"{options.load}: there is no such file")
    for flag in ("placement", "stages_per_rank", "memory_limit"):
        if getattr(options, flag) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} and --load: a file says itself what runs where; leave it out")
    try:
        lists = csv_file.load(options.load)
    except ScheduleError as error:
        raise _BadListsError(str(error)) from error
    idle = next((rank for rank, row in enumerate(lists) if not any(action.op in COMPUTE for action in row)), None)
    if idle is not None:
        raise _BadListsError(f"{options.load} has nothing for rank {idle} to compute; each rank needs a stage")
    if options.ranks not in (None, len(lists)):
        raise ValueError(f"{options.load} has {len(lists)} ranks, but --ranks is {options.ranks}")
    try:
        costs = _costs(options, len(csv_file.table_of(lists)))
        window = _window(options.window)
        return try_lists(
            lists,
            costs,
            num_chunks=options.chunks,
            transport=Transport(options.transport),
            window=1 if isinstance(window, str) else window,
        )
    except ScheduleError as error:
        raise _BadListsError(str(error)) from error


def _costs(options: argparse.Namespace, num_stages: int) -> Costs:
    def per_stage(flag: str, text: str) -> tuple[float, ...]:
        values = _numbers(flag, text)
        if len(values) not in (1, num_stages):
            raise ValueError(f"{flag} {text}: give one time, or one for each of the {num_stages} stages")
        return tuple(values * num_stages if len(values) == 1 else values)

    kept = _number("--kept", options.kept)
    if kept > 1:
        raise ValueError(f"--kept {options.kept}: a share, from 0 to 1")
    backward = per_stage("--backward", options.backward) if options.backward else ()
    return Costs(
        per_stage("--forward", options.forward),
        per_stage("--input-grad", options.input_grad),
        per_stage("--weight-grad", options.weight_grad),
        _number("--hop", options.hop),
        kept,
        backward,
    )


def _number(flag: str, text: str) -> float:
    values = _numbers(flag, text)
    if len(values) > 1:
        raise ValueError(f"{flag} {text}: give one number, it is the same everywhere")
    return values[0]


def _numbers(flag: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text}: not a number, nor numbers with commas between") from None
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"{flag} {text}: numbers are at least 0")
    return values


def _integers(
    flag: str, text: str, wanted: str = "give the rank of each stage with commas between, e.g. 0,1,1,0"
) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{flag} {text}: {wanted}")
    return [int(part) for part in parts]


def _window(text: str | None) -> Window | str:
    if text is None:
        return "measured"
    if text == "all":
        return None
    if not text.isdigit():
        raise ValueError(f"--window {text}: give a number of compute actions, or all")
    return int(text)


def _show(trial: Trial, options: argparse.Namespace) -> None:
    timeline = trial.timeline
    spans = timeline.spans if timeline else ()
    title = _summary(trial, options)
    if options.chrome_trace:
        Path(options.chrome_trace).write_text(chrome_trace(spans), encoding="utf-8")
    if options.svg:
        Path(options.svg).write_text(svg(spans, title=title), encoding="utf-8")
    if options.json:
        print(json.dumps(_document(trial)))
    elif options.csv:
        wanted = [[a for a in row if options.transfers or a.op in COMPUTE] for row in trial.lists]
        sys.stdout.write(to_csv(wanted, overlapped=options.overlapped))
    elif options.gantt or not (options.chrome_trace or options.svg):
        print(gantt(spans, width=options.width, title=title))
    else:
        print(title)


def _summary(trial: Trial, options: argparse.Namespace) -> str:
    name = options.load or options.schedule
    what = f"{name}: {len(trial.stage_ranks)} stages on {len(trial.lists)} ranks, {trial.num_chunks} chunks"
    timeline = trial.timeline
    if timeline is None:
        return f"{what}: deadlock"
    return (
        f"{what}: makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, in the longest span "
        f"{timeline.bubble_span:.1%}, at most {max(timeline.peak_chunks)} activations on a rank"
    )


def _document(trial: Trial) -> dict[str, object]:
    timeline = trial.timeline
    names = ("makespan", "cost", "bubble", "bubble_span", "peak_chunks", "peak_held")
    document: dict[str, object] = {name: getattr(timeline, name, None) for name in names}
    return document | {
        "deadlock": list(trial.deadlock) or None,
        "stage_ranks": trial.stage_ranks,
        "actions": [[str(action) for action in row] for row in trial.lists],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m stagekit.plan", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--schedule", metavar="NAME", help=f"{', '.join(NAMES)}, or a .csv file to load")
    parser.add_argument("--load", metavar="FILE.csv", help="verify and time the lists of this file")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--chunks", type=int)
    parser.add_argument(
        "--stages-per-rank", metavar="N[,N…]", help="1, or 2 where the schedule is a V; or a number for each rank"
    )
    parser.add_argument("--placement", metavar="R,R,…", help="rank of each stage, instead of the schedule's own table")
    costs = parser.add_argument_group("costs", "in any unit, one for all stages or one per stage with commas between")
    costs.add_argument("--forward", default="1", metavar="T")
    costs.add_argument("--input-grad", default="1", metavar="T")
    costs.add_argument("--weight-grad", default="1", metavar="T")
    costs.add_argument("--backward", metavar="T", help="of a full backward; the sum of both by default")
    costs.add_argument("--hop", default="0", metavar="T", help="of a message between two ranks")
    costs.add_argument("--kept", default="1", metavar="SHARE", help="of an activation, between its I and its W")
    parser.add_argument("--memory-limit", metavar="N", help="activations per rank, for zb-auto")
    parser.add_argument("--transport", choices=[t.value for t in Transport], default=Transport.IMPLICIT.value)
    parser.add_argument("--window", metavar="N|all", help="post a receive this many compute actions before its use")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="everything as one document")
    shown.add_argument("--gantt", action="store_true", help="the timeline as text (default)")
    shown.add_argument("--csv", action="store_true", help="the lists, as torch.distributed.pipelining reads them")
    parser.add_argument("--transfers", action="store_true", help="with --csv: sends and receives too")
    parser.add_argument("--overlapped", action="store_true", help="with --csv: neighbours F, B as one OVERLAP_F_B")
    parser.add_argument("--width", type=int, default=96, help="of the text timeline, in characters")
    parser.add_argument("--chrome-trace", metavar="FILE", help="write the timeline for chrome://tracing")
    parser.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
    return parser


if __name__ == "__main__":
    sys.exit(main())
