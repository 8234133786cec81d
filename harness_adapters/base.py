"""What an adapter is: a pure function from a task's agent document to a launch plan.

An adapter does no I/O. It says which files to write, which environment to set and which command to
run; the gateway does it. That makes every adapter testable as text.
"""

from typing import Any, ClassVar, Literal, Protocol

import msgspec


class ExecInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A shell command, run with `bash -c` (or `sh -c`), and where."""

    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None


class MCPServerSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool server for the harness; stdio needs `command`, the others need `url`."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "stdio"
    command: str | None = None
    args: list[str] = []
    url: str | None = None

    def __post_init__(self) -> None:
        if self.transport == "stdio" and not self.command:
            raise ValueError(f"MCP server {self.name!r} uses stdio and needs a command")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"MCP server {self.name!r} uses {self.transport} and needs a url")


class AgentSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The agent of a task: a registered harness by name, or an import path where allowed."""

    harness: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    mcp_servers: list[MCPServerSpec] = []
    skills_path: str | None = None
    """A folder inside the runtime."""
    custom_shell: ExecInput | None = None

    def __post_init__(self) -> None:
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("exactly one of harness and import_path must be given")
        if (self.harness == "shell") != (self.custom_shell is not None):
            raise ValueError("custom_shell is required by the harness 'shell' and by no other")
        if self.harness == "shell" and (self.mcp_servers or self.skills_path):
            raise ValueError("the harness 'shell' takes neither mcp_servers nor skills_path")


class LaunchContext(msgspec.Struct, kw_only=True, frozen=True):
    """What the gateway tells an adapter about the session; paths are those inside the runtime."""

    session_id: str
    instruction: str
    model_name: str
    """The name that the harness shall ask for."""
    model_url: str
    """Root of the model endpoint as the harness reaches it, without a trailing slash or /v1."""
    api_key: str
    session_dir: str
    """Usually /polar/session."""
    home_dir: str
    """A private HOME for the harness, empty before the plan's files are written."""
    log_dir: str
    instruction_path: str
    """A file that holds the instruction, written by the gateway before the run."""
    workdir: str | None = None
    pack_dir: str | None = None
    """Where the installed harness pack is found inside the runtime (see `npm`), None if none."""
    context_length: int = 131072
    """The model's context window in tokens, from the engine."""
    max_output_tokens: int = 16384


class LaunchPlan(msgspec.Struct, kw_only=True, frozen=True):
    """Everything the gateway does to run the harness once."""

    command: str
    """A shell command; the instruction is on its stdin."""
    files: dict[str, str] = {}
    """Absolute path inside the runtime -> text, written before the command runs, mode 0600."""
    env: dict[str, str] = {}
    cwd: str | None = None
    native_logs: list[str] = []
    """Files or folders of the harness's own session log, absolute, kept as artifacts."""


class HarnessEnd(msgspec.Struct, kw_only=True, frozen=True):
    """How a harness ended, judged by its event stream and exit status (exit codes lie)."""

    outcome: Literal["completed", "failed"]
    reason: str = ""
    """One sentence for people; empty when it simply completed."""
    return_code: int | None = None


class HarnessAdapter(Protocol):
    """One harness. `pack` names the installable pack it needs, None when it needs none."""

    name: ClassVar[str]
    pack: ClassVar[str | None]
    Settings: ClassVar[type[msgspec.Struct]]
    """What `AgentSpec.settings` may hold, checked at submit; forbids unknown fields."""

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan: ...

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """Judge the end from the exit status and the last 256 KiB of each output stream."""
        ...
