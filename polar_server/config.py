"""The server's configuration, and the topology file that holds both halves."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from polar_gateway.config import GatewayConfig


class RolloutConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The rollout server."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """0 takes a free one."""
    public_url: str | None = None
    """How nodes reach the server; None: derived from host and port, a wildcard becomes 127.0.0.1."""
    save_dir: Path | None = None
    """Where results are stored; None: below `data_dir`."""
    data_dir: Path | None = None
    """The database and what belongs to it; None: a folder below the user's state folder."""
    database_url: str | None = None
    """SQLAlchemy URL; None: SQLite below `data_dir`."""
    token_file: Path | None = None
    """A 0600 file that holds the bearer token of every route but health; made when it is missing.
    None: below `data_dir`."""
    open_submit: bool = False
    """Let submit and poll go without a token; only where no runtime shares the host's network."""
    dispatch_poll_interval_seconds: float = 1.0
    """Accepted for old topology files; dispatch is driven by events."""
    callback_grace_seconds: float = 120.0
    """Accepted for old topology files; results are delivered until acknowledged."""


class Topology(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A whole deployment in one file."""

    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)


class ConfigError(Exception):
    """The configuration cannot be read or is wrong; the message names file and field."""


def load_topology(path: Path | None, overrides: dict[str, Any] | None = None) -> Topology:
    """Read YAML (or JSON), lay the environment over it, then `overrides`, each a dotted path.

    `POLAR_ROLLOUT__PORT=9000` sets rollout.port. Raises ConfigError.
    """
    document: Any = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must hold a mapping with the keys rollout and gateway")
    for section in ("ROLLOUT", "GATEWAY"):
        prefix = f"POLAR_{section}__"
        for name, value in os.environ.items():
            if name.startswith(prefix):
                _put(document, f"{section.lower()}.{name[len(prefix):].lower()}", yaml.safe_load(value))
    for dotted, value in (overrides or {}).items():
        _put(document, dotted, value)
    try:
        return msgspec.convert(document, Topology, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'the configuration'}: {error}") from error


def _put(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        document = document.setdefault(key, {})
    document[last] = value
