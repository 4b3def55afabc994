"""Values of a job file: sizes and durations as people write them, and what no message or environment can carry.

Used by pipeapi.jobspec alone; a ValueError here becomes a mistake with its place there.
"""

from __future__ import annotations

import re

MAX_ENV_BYTES = 131_068  # longer: execve fails with E2BIG
_ENV_NAME = re.compile(r"^[A-Z_][A-Z0-9_]*$")
_RESERVED_ENV = re.compile(
    r"^(LD_|PYTHON|GRPC_|PIPED_|BASH_FUNC|MASTER_|TORCHELASTIC_|RANK$|WORLD_SIZE$|CUDA_VISIBLE_DEVICES$)"
)
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?")
_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "KB": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*(B|[KMG]iB|[kKMG]B|)\s*$"


def parse_size(value: object) -> object:
    """Return bytes for "25MiB", 1024 or "1.5 GB"; anything else comes back for pydantic to refuse.

    The library reads the same words (stagekit.plan.split.parse_bytes); neither may import the other.
    """
    if not isinstance(value, str):
        return value
    match = re.match(SIZE_PATTERN, value, re.ASCII)
    if match is None:
        raise ValueError(f'"{value}" is not a size; write e.g. "25MiB" ({", ".join(filter(None, _SIZE_UNITS))})')
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_duration(value: object) -> object:
    """Return seconds for "30s", "2m", "1h" or a number."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)\s*(s|m|h)", value.strip())
        if not match:
            raise ValueError('not a duration; write e.g. "30s"')
        return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    return value


def check_label(name: str, value: str) -> None:
    """Raise ValueError for a label that no node can have."""
    if not _LABEL.fullmatch(name) or not (value == "" or _LABEL.fullmatch(value)):
        raise ValueError(
            f"{name}={value}: no label; use 1 to 63 letters, digits, '.', '_', '-' and '/', with a letter or digit at both "
            "ends; the value may be empty"
        )


def check_env(name: str, value: str) -> None:
    """Raise ValueError for a name or value that a worker's environment must not carry."""
    if not _ENV_NAME.match(name):
        raise ValueError(f"{name}: not an environment name; use capitals, digits and _")
    if _RESERVED_ENV.match(name):
        raise ValueError(f"{name}: reserved; jobs can't set LD_*, PYTHON*, GRPC_*, PIPED_*, MASTER_*, RANK, WORLD_SIZE")
    if len(name) + len(value.encode()) + 2 > MAX_ENV_BYTES:
        raise ValueError(f"{name}: {len(value.encode())} bytes; one environment entry holds at most {MAX_ENV_BYTES}")
    if "\0" in value:
        raise ValueError(f"{name}: contains a NUL byte")


def check_param(name: str, value: object) -> None:
    """Raise ValueError for a value of `params` that no message carries unchanged."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name}: the key {key!r} is no string")
            check_param(f"{name}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_param(f"{name}[{index}]", item)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name}: {value} does not fit into 64 bits")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: holds a lone surrogate, which is no text") from None
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"{name}: {value!r} is no number, string, list or mapping; quote it")
