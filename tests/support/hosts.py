"""Test hosts: network namespaces joined by a switch, each with an address of its own. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Hosts:
    """`with Hosts(3) as hosts`: host n has the address 10.77.0.(n + 1); nothing of it is left afterwards."""

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
