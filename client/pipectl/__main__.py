"""`pipectl`: the command line. Commands are imported when they run, so that --help stays fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

# name → (module in pipectl.commands, one line of help)
COMMANDS = {
    "demo": ("demo", "Run a coordinator, two nodes and a small real training on this machine."),
    "submit": ("submit", "Submit a job file."),
    "plan": ("plan", "Plan a job here: where it is cut, what a step will take. Needs torch."),
    "validate": ("validate", "Check job files without submitting them."),
    "schema": ("schema", "Print the JSON Schema of the job file, or an example."),
    "explain": ("schema", "Explain a field of the job file."),
    "get": ("get", "List jobs or nodes."),
    "describe": ("describe", "Show one job: where every stage runs, its buckets, its failure."),
    "logs": ("logs", "Print what workers wrote."),
    "wait": ("wait", "Wait for a job; the exit code says how it ended."),
    "cancel": ("cancel", "Cancel a job."),
    "cordon": ("node", "Keep new work from a node."),
    "uncordon": ("node", "Open a node to new work again; ends a drain, too."),
    "drain": ("node", "Empty a node: no new work, and what still runs at the deadline is stopped."),
    "forget": ("node", "Give up a lost node for good: its slots are freed, its unfinished ranks are lost."),
    "hold": ("hold", "Keep a queued job from being placed."),
    "release": ("hold", "Let a held job be placed."),
    "events": ("events", "Print what happened to a job, or to everything."),
    "version": ("version", "Print versions of client and coordinator."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, but Ctrl-C ends with 130, as a shell says it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"pipectl.commands.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], list(COMMANDS), 1)
            ctx.fail(f'no command "{args[0]}"' + (f'; did you mean "{near[0]}"?' if near else ""))
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--coordinator", metavar="HOST:PORT", help="Address of the coordinator [PIPECTL_COORDINATOR].")
@click.pass_context
def main(ctx: click.Context, coordinator: str | None) -> None:
    """Train models in pipeline stages over several machines."""
    ctx.obj = coordinator


if __name__ == "__main__":
    main()
