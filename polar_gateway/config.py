"""A node's configuration: the `gateway` part of the topology file."""

import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from polar_gateway.protocol import Id, RuntimeSpec

DEFAULT_BASE_URL = "http://127.0.0.1:8000"


class BackendConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One running server of the engine."""

    base_url: str
    name: Id | None = None
    """By which the admin routes and the recorded calls know it; None: backend-1, backend-2, ..."""
    api_key_env: str | None = None
    """Name of the variable that holds its bearer token."""


class InferenceConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The engine behind a node."""

    engine: Literal["vllm", "sglang", "openai"] = "vllm"
    base_url: str = DEFAULT_BASE_URL
    api_key_env: str | None = None
    """Name of the variable that holds the engine's bearer token."""
    backends: list[BackendConfig] = []
    """Where there are several servers of the same model: all of them, in place of `base_url` and
    `api_key_env`. Others may come and go at run time."""
    scheduler: Literal["none", "thunderagent"] = "none"
    """Accepted for old topology files; requests go to the engine as they come."""
    prompts: Literal["auto", "messages", "tokens"] = "auto"
    """How the engine is asked: with messages, or with the recorded ids and what is new. `auto`
    takes tokens wherever the engine can and nothing is lost by it."""
    token_route: Literal["chat", "generate"] = "chat"
    """`generate` where the engine shall say which weights sampled which token; answers then come
    whole, not as live text."""
    history: Literal["template", "keep"] = "template"
    """What happens where the chat template takes recorded tokens out of the history (earlier
    reasoning): a branch begins with the canonical rendering, or the record is kept and extended."""

    def __post_init__(self) -> None:
        if self.backends and (self.base_url != DEFAULT_BASE_URL or self.api_key_env is not None):
            raise ValueError(
                "inference.backends names all servers: base_url and api_key_env must not be set "
                "beside it"
            )
        names = [backend.name for backend in self.backends if backend.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"inference.backends[].name must be unique; {', '.join(twice)} appears twice"
            )

    @property
    def servers(self) -> list[BackendConfig]:
        """All servers, at least one."""
        return self.backends or [
            BackendConfig(base_url=self.base_url, api_key_env=self.api_key_env)
        ]


class CompletionPersistence(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Accepted for old topology files. Completions are always journalled; nothing is truncated."""

    enabled: bool = True
    max_field_bytes: int = 1 << 20
    queue_size: int = 1024
    write_workers: int = 8
    batch_size: int = 16
    write_max_attempts: int = 3
    retry_backoff_seconds: float = 0.1


class ModelCallConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How harnesses are served on a node's model listener."""

    max_body_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 32 << 20
    """Of a request; a full context of images stays below."""
    max_decompressed_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 32 << 20
    """Of a request that came compressed."""
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 64 << 10
    """Of what is no body: a request's line and headers, or what stands between the pieces of a
    chunked body and behind them. Harnesses send a few kilobytes."""
    max_unread_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 128 << 20
    """Of the request bodies that one session is sending at a time."""
    max_calls: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Of one session at a time; harnesses with parallel sub-agents make a few dozen."""
    header_delay_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """After which an answer's headers leave without anything to go with them."""
    keep_alive_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Of silence after which a harness is given a sign of life."""
    retry_grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """For which a generation outlives the connection of the harness that asked for it."""
    engine_patience_seconds: Annotated[float, msgspec.Meta(ge=0)] = 120.0
    """For which a call that the engine failed is asked again before the harness hears of it."""


class JournalConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How durable the record of model calls is."""

    fsync: bool = False
    """Whether a record also survives the death of the host: a call waits until the disk has it,
    which is asked once for all sessions that wait."""


class NodeConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One gateway node."""

    id: Id = msgspec.field(default_factory=socket.gethostname)
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8081
    """The control listener; 0 takes a free one."""
    public_url: str | None = None
    """How the server reaches the control listener; None: derived from host and port."""
    model_host: str = "127.0.0.1"
    model_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """The model listener, for runtimes that share the host's network; 0 takes a free port."""
    model_calls: ModelCallConfig = msgspec.field(default_factory=ModelCallConfig)
    journal: JournalConfig = msgspec.field(default_factory=JournalConfig)
    model_served: str = ""
    """The engine's model name; empty: the first that the engine lists."""
    inference: InferenceConfig = msgspec.field(default_factory=InferenceConfig)
    max_init_workers: Annotated[int, msgspec.Meta(ge=1)] = 4
    max_run_workers: Annotated[int, msgspec.Meta(ge=1)] = 2
    max_postrun_workers: Annotated[int, msgspec.Meta(ge=1)] = 4
    max_ready_sessions: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Places for prepared sessions that wait for a RUNNING slot."""
    default_runtime: RuntimeSpec | None = None
    """For tasks that name no runtime."""
    data_dir: Path | None = None
    """Journals, artifacts and undelivered results; None: a folder below the user's state folder."""
    pack_dir: Path | None = None
    """Where harness packs are installed; None: the cache folder of `polar harness install`."""
    allow_unisolated: bool = False
    """Permit the runtime `local`, which isolates nothing."""
    upload_roots: list[Path] = []
    """Folders of this host from which prepare actions may upload; empty: none."""
    mount_roots: list[Path] = []
    """Folders of this host that `runtime.kwargs.volumes` may mount; empty: none."""
    model_pool: list[Any] = []
    """Accepted for old topology files while it is empty; a node serves one model."""

    def __post_init__(self) -> None:
        if self.model_pool:
            raise ValueError(
                f"model_pool of node {self.id} must be empty: a node serves one model, the one of its"
                " inference"
            )


class GatewayConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All nodes of a deployment, and where their server is."""

    nodes: list[NodeConfig] = []
    heartbeat_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    rollout_server_url: str | None = None
    """None: the server's public_url."""
    completion_persistence: CompletionPersistence = msgspec.field(
        default_factory=CompletionPersistence
    )

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"gateway.nodes[].id must be unique; {', '.join(twice)} appears twice")
