"""Test hosts: network namespaces joined by a switch, each with an address of its own. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.support.cluster import wait_for_no_process_of, wait_until


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Hosts:
    """`with Hosts(3) as hosts`: host n has the address 10.77.0.(n + 1); nothing of it is left afterwards.

    Each also has an interface that leads nowhere, and comes first.
    """

    def __init__(self, count: int) -> None:
        prefix = f"t{os.getpid() % 100_000}"
        self.names = [f"{prefix}h{n}" for n in range(count)]
        self._switch = f"{prefix}sw"

    def __enter__(self) -> Hosts:
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for n, name in enumerate(self.names):
                self._add(n, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, n: int, name: str) -> None:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "aside0", "type", "veth", "peer", "name", "aside1")
        ip("-n", name, "addr", "add", "10.66.0.1/24", "dev", "aside0")
        ip("-n", name, "link", "set", "aside0", "up")
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{n}", "netns", self._switch)
        ip("-n", name, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", self._switch, "link", "set", f"p{n}", "master", "br0")
        ip("-n", self._switch, "link", "set", f"p{n}", "up")

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)

    @staticmethod
    def address(n: int) -> str:
        """Return the address of host `n`."""
        return f"10.77.0.{n + 1}"

    def command(self, n: int, *command: str) -> list[str]:
        """Return the command line that runs `command` on host `n`."""
        return ["ip", "netns", "exec", self.names[n], *command]


@contextmanager
def fleet(folder: Path, *, nodes: int, slots: int) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Yield pipectl of a coordinator on one host and of nodes "a", "b", … on hosts of their own; all is stopped afterwards.

    Host n is node n, the last one the coordinator's.
    """
    with Hosts(nodes + 1) as hosts, fleet_on(hosts, folder, nodes=nodes, slots=slots) as pipectl:
        yield pipectl


@contextmanager
def fleet_on(
    hosts: Hosts, folder: Path, *, nodes: int, slots: int, flags_of: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """As `fleet`, on hosts that are there, with more flags for some nodes."""
    processes: list[subprocess.Popen[bytes]] = []
    here = hosts.address(nodes)

    def start(n: int, name: str, *arguments: str) -> None:
        piped = [sys.executable, "-m", "piped", *arguments, "--state-dir", str(folder / name), "--insecure"]
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(hosts.command(n, *piped), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )
        wait_until((folder / name / "endpoints.json").exists, 30, f"{name}'s start")

    def pipectl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipectl", "--coordinator", f"{here}:7400", *arguments]
        return subprocess.run(hosts.command(nodes, *command), capture_output=True, text=True, timeout=180, check=False)

    try:
        flags = ["--listen", f"{here}:7400", "--http", f"{here}:7401", "--health", "127.0.0.1:0"]
        start(nodes, "coordinator", "coordinator", *flags)
        for n in range(nodes):
            address, name = hosts.address(n), chr(ord("a") + n)
            flags = ["--coordinator", f"{here}:7400", "--data-address", address, "--metrics", f"{address}:9464"]
            flags += flags_of.get(name, ())
            start(n, name, "node", "--name", name, *flags, "--slots", str(slots), "--stop-workers-on-exit")
        wait_until(lambda: len(json.loads(pipectl("get", "nodes", "-o", "json").stdout)) == nodes, 20, "every node")
        yield pipectl
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
        assert wait_for_no_process_of(folder) == {}
