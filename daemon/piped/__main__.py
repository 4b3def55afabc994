"""`piped coordinator | node | shim | worker`: reads flags and configuration, then starts one of the four.

Imports are lazy on purpose: `piped shim` loads the standard library alone, `piped worker` never grpc,
`piped coordinator` and `piped node` never torch (tests/unit/node/test_imports.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all four commands; the deployment tests parse their manifests' arguments with it."""
    parser = argparse.ArgumentParser(prog="piped", description="Daemons of pipectl.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="coordinator | node | shim | worker")

    coordinator = commands.add_parser("coordinator", help="place jobs on nodes and watch over them", allow_abbrev=False)
    _daemon_flags(coordinator)
    coordinator.add_argument("--listen", metavar="HOST:PORT", help="gRPC for clients and nodes (127.0.0.1:7400)")
    coordinator.add_argument("--http", metavar="HOST:PORT", help="/metrics and /sd/prometheus (127.0.0.1:7401)")
    coordinator.add_argument("--health", metavar="HOST:PORT", help="grpc.health.v1 alone (127.0.0.1:7402)")
    coordinator.add_argument("--beat-s", type=float, metavar="S", help="a node's beat (1.0)")
    coordinator.add_argument("--lease-ttl-s", type=float, metavar="S", help="silence after which a node is lost (4.0)")

    coordinator.add_argument(
        "--accept-rollback",
        action="store_true",
        help="for one start on a store older than its fleet (an old backup): give up what came after it",
    )

    node = commands.add_parser("node", help="run workers on this machine", allow_abbrev=False)
    _daemon_flags(node)
    node.add_argument("--name", help="unique among live nodes (the host name)")
    node.add_argument("--coordinator", metavar="HOST:PORT", help="127.0.0.1:7400")
    node.add_argument("--data-address", metavar="HOST", help="where workers listen for their peers (127.0.0.1)")
    node.add_argument("--metrics", metavar="HOST:PORT", help="what Prometheus scrapes (127.0.0.1:9464)")
    node.add_argument("--health", metavar="HOST:PORT", help="grpc.health.v1 alone (none)")
    node.add_argument("--slots", type=int, metavar="N", help="workers at a time (one per CUDA device, else per core)")
    node.add_argument(
        "--label",
        action="append",
        dest="labels",
        metavar="KEY=VALUE",
        help="for resources.node_selector; may be repeated",
    )
    node.add_argument("--keep-attempts", type=int, metavar="N", help="directories of ended attempts to keep (20)")
    node.add_argument(
        "--stop-workers-on-exit", action="store_true", default=None, help="SIGTERM stops every worker first"
    )

    shim = commands.add_parser("shim", help="supervise one attempt's workers (started by the node daemon)")
    shim.add_argument("--dir", type=Path, required=True, metavar="DIR", help="the attempt's directory")
    shim.add_argument("--fence", type=int, required=True, metavar="N")
    shim.add_argument("--job-id", required=True, metavar="ID")

    commands.add_parser("worker", help="run one rank's stages (started by the shim)")
    return parser


def _daemon_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML; flags override its keys")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="a local directory that this daemon owns")
    parser.add_argument("--insecure", action="store_true", default=None, help="allow plaintext beyond loopback")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    flags = vars(build_parser().parse_args(argv))
    command = flags.pop("command")
    if command == "shim":
        from piped.shim.main import run as run_shim

        return run_shim(flags["dir"], flags["fence"], flags["job_id"])
    if command == "worker":
        from piped.worker.main import main as run_worker

        return int(run_worker() or 0)
    return _run_daemon(command, flags)


def _run_daemon(command: str, flags: dict[str, object]) -> int:
    # Tried: a fork with live grpc threads crashes or hangs; we exec only, and this keeps grpc from installing hooks.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    import asyncio

    from piped import logs
    from piped.config import EXIT_CONFIG, ConfigError, load_coordinator, load_node

    logs.configure(level=str(flags.pop("log_level")))
    file = flags.pop("config")
    assert file is None or isinstance(file, Path)
    try:
        if command == "coordinator":
            accept_rollback = bool(flags.pop("accept_rollback"))
            coordinator_config = load_coordinator(file, flags)
            from piped.coordinator.server import run as run_coordinator

            return int(asyncio.run(run_coordinator(coordinator_config, accept_rollback=accept_rollback)) or 0)
        node_config = load_node(file, flags)
        from piped.node.app import run as run_node

        return asyncio.run(run_node(node_config))
    except ConfigError as error:
        print(f"piped {command}: {error}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
