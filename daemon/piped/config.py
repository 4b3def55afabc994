"""Daemon configuration: one TOML file per daemon -> a frozen dataclass, checked once, at start.

A flag of the same name overrides a key. Nothing below this module reads the environment or a file of settings.
`piped.__main__` calls the two loaders; a ConfigError becomes exit status 78 there (EX_CONFIG, which the systemd
units list in RestartPreventExitStatus).
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from piped.core.specs import LABEL, NAME

EXIT_CONFIG = 78
NODE_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62})$")


Labels = tuple[tuple[str, str], ...]  # sorted
Quotas = tuple[tuple[str, int], ...]


class ConfigError(Exception):
    """The operator must change the configuration; the text says what, where, why and the next step."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Settings of `piped coordinator`. Addresses are "host:port"; port 0 takes any free one."""

    state_dir: Path
    listen: str = "127.0.0.1:7400"  # gRPC: clients and nodes
    http: str = "127.0.0.1:7401"  # /metrics, /sd/prometheus
    health: str = "127.0.0.1:7402"  # grpc.health.v1 alone, plaintext
    beat_s: float = 1.0
    lease_ttl_s: float = 4.0
    quotas: Quotas = ()  # slots that the jobs of a tenant may hold at once; one that is not named may hold any number
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of `piped node`."""

    state_dir: Path
    name: str
    coordinator: str = "127.0.0.1:7400"
    data_address: str = "127.0.0.1"  # where workers listen for their peers
    metrics: str = "127.0.0.1:9464"
    health: str | None = None
    slots: int | None = None  # None: one per CUDA device, else one per core
    labels: Labels = ()  # what resources.node_selector of a job asks for
    keep_attempts: int = 20  # directories of ended attempts
    insecure: bool = False
    min_free_mib: int = 256  # on the disk of state_dir, else no job is prepared
    clock_offset_s: float = 0.0  # added to this node's wall clock: for tests of clocks that differ
    stop_workers_on_exit: bool = False  # SIGTERM stops every worker first: for containers and demos


def load_coordinator(file: Path | None, overrides: Mapping[str, object]) -> CoordinatorConfig:
    """Return the coordinator's settings from `file` and the flags that were given. Raises ConfigError."""
    values = _merged(CoordinatorConfig, file, overrides)
    config = CoordinatorConfig(**values)
    for key in ("listen", "http", "health"):
        parse_address(getattr(config, key), key)
    for key in ("beat_s", "lease_ttl_s"):
        _positive(getattr(config, key), key)
    if config.lease_ttl_s < 2 * config.beat_s:
        raise ConfigError(
            f"lease_ttl_s: {config.lease_ttl_s} s is less than two beats of {config.beat_s} s, so one late beat "
            f"would lose a node; set it to at least {2 * config.beat_s}"
        )
    _refuse_plaintext(config.insecure, listen=config.listen, http=config.http)
    return config


def load_node(file: Path | None, overrides: Mapping[str, object]) -> NodeConfig:
    """Return a node daemon's settings from `file` and the flags that were given. Raises ConfigError."""
    values = _merged(NodeConfig, file, overrides)
    values.setdefault("name", socket.gethostname())
    config = NodeConfig(**values)
    if not NODE_NAME.match(config.name):
        raise ConfigError(
            f"name: {config.name!r} is no node name; use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or a digit"
        )
    parse_address(config.coordinator, "coordinator")
    parse_address(config.metrics, "metrics")
    if config.health is not None:
        parse_address(config.health, "health")
    if not config.data_address or any(mark in config.data_address for mark in "/ []"):
        raise ConfigError(f"data_address: {config.data_address!r} is neither a host name nor an IP address")
    if config.slots is not None and not 1 <= config.slots <= 4096:
        raise ConfigError(f"slots: {config.slots} is outside 1 … 4096; leave it out for one per device or core")
    if config.min_free_mib < 0:
        raise ConfigError(f"min_free_mib: {config.min_free_mib} is less than 0; write how many MiB must be free, or 0")
    if config.keep_attempts < 1:
        raise ConfigError(f"keep_attempts: {config.keep_attempts} is less than 1; the newest attempt's logs are needed")
    _refuse_plaintext(config.insecure, coordinator=config.coordinator, metrics=config.metrics)
    return config


def parse_address(text: str, key: str) -> tuple[str, int]:
    """Split "host:port" (or "[v6]:port"). Raises ConfigError naming `key`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{key}: {text!r} is no address; write "host:port" with a port of 0 … 65535')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Say whether `host` names this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_plaintext(insecure: bool, **addresses: str) -> None:
    for key, text in addresses.items():
        host, _ = parse_address(text, key)
        if not insecure and not is_loopback(host):
            raise ConfigError(
                f"{key}: {text!r} is not a loopback address and the connection is not encrypted: whoever reaches it "
                f"can run code; use 127.0.0.1, or write insecure = true (--insecure) in a network that you trust"
            )


def _merged(kind: type[Any], file: Path | None, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return the keys of `file` under those of `overrides` that are not None, each with its field's type."""
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    where = {}
    for key, value in _read(file).items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{key}: unknown key ({file}); {hint}")
        values[key], where[key] = value, str(file)
    for key, value in overrides.items():
        if value is not None:
            values[key], where[key] = value, f"--{key.replace('_', '-')}"
    for key, value in values.items():
        values[key] = _typed(key, value, str(known[key].type), where[key])
    if "state_dir" in known and "state_dir" not in values:
        default = os.environ.get("STATE_DIRECTORY", "").split(":")[0]  # systemd's StateDirectory=
        if not default:
            raise ConfigError("state_dir: required and not given; pass --state-dir DIR or set state_dir in the file")
        values["state_dir"] = Path(default)
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values and n != "name"]
    if missing:
        raise ConfigError(f"{missing[0]}: required and not given")
    return values


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: can't read {file}: {error.strerror}; check the path and its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {file} is not TOML: {error}") from error


def _typed(key: str, value: object, declared: str, where: str) -> object:
    """Return `value` as the field's declared type, or raise ConfigError; a bool is no number here."""
    name = declared.removesuffix(" | None")
    accepts: dict[str, tuple[tuple[type, ...], Callable[[Any], object]]] = {
        "Path": ((str, Path), lambda raw: Path(raw).expanduser().absolute()),
        "str": ((str,), str),
        "float": ((int, float), float),
        "int": ((int,), int),
        "bool": ((bool,), bool),
        "Labels": ((dict, list), lambda raw: _labels(raw, where)),
        "Quotas": ((dict,), lambda raw: _quotas(raw, where)),
    }
    types, convert = accepts[name]
    if not isinstance(value, types) or (isinstance(value, bool) and name != "bool"):
        raise ConfigError(f"{key}: {value!r} ({where}) is of type {type(value).__name__}; {name} is needed")
    return convert(value)


def _labels(raw: dict[str, object] | list[str], where: str) -> Labels:
    """Return the labels of a table, or of KEY=VALUE flags."""
    for text in raw if isinstance(raw, list) else ():
        if "=" not in text:
            raise ConfigError(f"labels: {text!r} ({where}) has no '='; write KEY=VALUE, or {text}= for an empty value")
    pairs = list(raw.items()) if isinstance(raw, dict) else [text.partition("=")[::2] for text in raw]
    labels: dict[str, str] = {}
    for name, value in pairs:
        if name in labels:
            raise ConfigError(f"labels: {name} ({where}) is given twice, {labels[name]!r} and {value!r}; give it once")
        if not isinstance(value, str) or not LABEL.fullmatch(name) or not (value == "" or LABEL.fullmatch(value)):
            raise ConfigError(
                f"labels: {name}={value} ({where}) is no label; write KEY=VALUE of at most 63 letters, digits, '.', '_', '-' "
                "and '/' each, with a letter or digit at both ends"
            )
        labels[name] = value
    return tuple(sorted(labels.items()))


def _quotas(raw: dict[str, object], where: str) -> Quotas:
    quotas = {}
    for tenant, slots in raw.items():
        if not NAME.fullmatch(tenant):
            raise ConfigError(
                f"quotas: {tenant!r} ({where}) can be no job's tenant: use 1 to 63 of a-z, 0-9, '-', '.', a letter or digit "
                "at both ends"
            )
        if not isinstance(slots, int) or isinstance(slots, bool) or slots < 0:
            raise ConfigError(f"quotas.{tenant}: {slots!r} ({where}) is no number of slots; write 0 or more")
        quotas[tenant] = slots
    return tuple(sorted(quotas.items()))


def _positive(value: float, key: str) -> None:
    if not 0 < value < 1e6:
        raise ConfigError(f"{key}: {value} is no usable number of seconds; write one above 0")
