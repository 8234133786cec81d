"""The server's configuration, and the topology file that holds both halves."""

import os
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from polar_gateway.config import GatewayConfig, NodeConfig


def state_dir() -> Path:
    """Where services keep their state for this user unless told otherwise."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "polar"


ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


class RetryConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How often a session is tried when the infrastructure fails it."""

    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Attempts in all; a graded, failed or timed out agent is never tried again."""


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
    """Let submit and poll go without a token; only on a loopback host, and where no runtime shares
    the host's network."""
    retry: RetryConfig = msgspec.field(default_factory=RetryConfig)
    dispatch_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long a node may take to answer one dispatch or cancellation."""
    dispatch_poll_interval_seconds: float = 1.0
    """Accepted for old topology files; dispatch is driven by events."""
    callback_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """How long a trainer's receiver may stay silent during one delivery."""
    callback_retry_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """The pause before a callback's second try; it doubles with every further one, up to 5 min."""
    callback_give_up_seconds: Annotated[float, msgspec.Meta(gt=0)] = 86400.0
    """How long a callback is tried for."""
    callback_grace_seconds: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long a node may take to report a session that it was told to cancel; past it the server
    ends the session itself."""
    http_max_connections: int = 1024
    """Accepted for old topology files, as are the four below; places and tries bound what is open."""
    http_max_keepalive_connections: int = 256
    cleanup_max_concurrency: int = 128
    cleanup_max_attempts: int = 3
    cleanup_retry_backoff_seconds: float = 0.1

    @property
    def data_path(self) -> Path:
        return self.data_dir or state_dir() / "server"

    @property
    def results_path(self) -> Path:
        return self.save_dir or self.data_path / "results"

    @property
    def token_path(self) -> Path:
        return self.token_file or self.data_path / "token"

    @property
    def sqlalchemy_url(self) -> str:
        """`database_url` with an asynchronous driver."""
        url = self.database_url or f"sqlite:///{self.data_path / 'polar.db'}"
        scheme, colon, rest = url.partition("://")
        return ASYNC_DRIVERS.get(scheme, scheme) + colon + rest

    @property
    def reachable_url(self) -> str:
        """Where nodes and people reach the server; meaningful once `port` is not 0."""
        if self.public_url:
            return self.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Topology(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A whole deployment in one file."""

    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)


class ConfigError(Exception):
    """The configuration cannot be read or is wrong; the message names file and field."""


def check_open_submit(rollout: RolloutConfig, nodes: Iterable[NodeConfig] = ()) -> None:
    """Raise ConfigError where submit is open to whom it must not be."""
    if not rollout.open_submit:
        return
    if not _is_loopback(rollout.host):
        raise ConfigError(
            f"rollout.open_submit needs a loopback rollout.host, not {rollout.host!r}: whoever reaches it"
            " could submit"
        )
    for node in nodes:
        if node.allow_unisolated:
            raise ConfigError(
                f"rollout.open_submit and allow_unisolated of node {node.id} exclude each other: harnesses"
                " that share the host's network could submit"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_topology(path: Path | None, overrides: dict[str, Any] | None = None) -> Topology:
    """Read YAML (or JSON), lay the environment over it, then `overrides`, each a dotted path.

    `POLAR_ROLLOUT__PORT=9000` sets rollout.port. Raises ConfigError.
    """
    document: Any = {}
    if path is not None:
        try:
            document = _yaml(path.read_bytes(), str(path)) or {}
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must hold a mapping with the keys rollout and gateway")
    for section in ("ROLLOUT", "GATEWAY"):
        prefix = f"POLAR_{section}__"
        for name, value in os.environ.items():
            if name.startswith(prefix):
                dotted = f"{section}.{name[len(prefix):].replace('__', '.')}".lower()
                _put(document, dotted, _yaml(value, name))
    for dotted, value in (overrides or {}).items():
        _put(document, dotted, value)
    try:
        topology = msgspec.convert(document, Topology, strict=True, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'the configuration'}: {error}") from error
    check_open_submit(topology.rollout, topology.gateway.nodes)
    return topology


def _yaml(text: str | bytes, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{where} is not YAML: {error}") from error


def _put(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConfigError(f"{dotted} cannot be set: {key} is not a mapping in the configuration")
    document[last] = value


def _path(kind: type[Any], value: Any) -> Any:
    """Paths are written as text; a leading ~ is the user's home."""
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise ValueError(f"expected a path, got {value!r}")
