"""What this machine offers: slots (CUDA devices or cores) and the network interface of its data address.

Asked once, at start, by piped.node.app. No CUDA library is loaded: the driver's own tool or /proc answers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from piped.config import ConfigError, is_loopback
from piped.node.model import Slot

_NVIDIA_SMI_S = 10.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def find_slots(wanted: int | None) -> tuple[Slot, ...]:
    """Return one slot per CUDA device, else per core; `wanted` takes the first so many devices, or that many CPU slots."""
    uuids = cuda_uuids()
    if uuids and (wanted is None or wanted <= len(uuids)):
        return tuple(Slot(index, f"cuda:{index}", uuid) for index, uuid in enumerate(uuids[:wanted]))
    count = wanted or len(os.sched_getaffinity(0))
    return tuple(Slot(index, f"cpu:{index}") for index in range(count))


def cuda_uuids() -> list[str]:
    """Return the UUIDs of the CUDA devices in the driver's order; empty without any."""
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        except (OSError, subprocess.SubprocessError):
            answer = None
        if answer is not None:
            return [line.strip() for line in answer.stdout.splitlines() if line.strip().startswith("GPU-")]
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("GPU UUID:"):
                found.append(line.split(":", 1)[1].strip())
    return [uuid for uuid in found if uuid.startswith("GPU-") and "?" not in uuid]


def interface_of(address: str) -> str:
    """Return the name of the interface that owns `address`, for GLOO_SOCKET_IFNAME. Raises ConfigError."""
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"data_address: {address!r} does not resolve: {error}; write an IP address") from error
    wanted = str(resolved[0])
    if is_loopback(wanted) and not is_loopback(address):
        raise ConfigError(
            f"data_address: {address!r} resolves to {wanted} here (see /etc/hosts), where no other host reaches this one; write the "
            "IP address of the interface that workers shall use"
        )
    found = _ipv4_interfaces() if family == socket.AF_INET else _ipv6_interfaces()
    if wanted.startswith("127."):
        wanted = "127.0.0.1"  # all of 127.0.0.0/8 is the loopback interface's
    if wanted not in found:
        raise ConfigError(
            f"data_address: {address!r} is {wanted}, and no interface of this machine has it "
            f"(there are {', '.join(f'{a} on {n}' for a, n in sorted(found.items())) or 'none'}); choose one of them"
        )
    return found[wanted]


def _ipv4_interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _ipv6_interfaces() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[5] for row in rows}
