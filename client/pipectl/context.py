"""Who asks, and which coordinator: flag > PIPECTL_COORDINATOR > ~/.config/pipectl/config.yaml > 127.0.0.1:7400."""

from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path

from pipectl.errors import CommandError, Exit

DEFAULT = "127.0.0.1:7400"


def config_path() -> Path:
    """Return the user's configuration file, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pipectl" / "config.yaml"


def coordinator_address(flag: str | None) -> str:
    """Return "host:port". Raises CommandError for a broken configuration file."""
    if flag:
        return flag
    if address := os.environ.get("PIPECTL_COORDINATOR"):
        return address
    path = config_path()
    if not path.exists():
        return DEFAULT
    import yaml

    try:
        data = yaml.safe_load(path.read_text()) or {}
        return str(data.get("coordinator", DEFAULT))
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise CommandError(f"can't read {path}: {error}", Exit.USAGE, "write e.g. coordinator: 10.0.0.1:7400") from None


def whoami() -> str:
    """Return user@host, which operators' commands leave for others to see. Nobody checks it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a uid without a name
        user = "unknown"
    return f"{user}@{platform.node()}"
