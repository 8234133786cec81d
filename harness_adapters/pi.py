"""Pi (`pi -p`), which is configured here to speak Chat Completions.

It runs in text mode. In its JSON mode the exit status is 0 also after a fatal error and each token
prints the whole message so far, twice (83 MB for an answer of 4,000 tokens); in text mode the
status is honest, stderr says what happened, and the session file in its HOME has every event.
"""

import json
import re
import shlex
from typing import Any, ClassVar, Literal

import msgspec

from harness_adapters import events
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

KEY_ENV = "POLAR_MODEL_KEY"

PROVIDER = "gateway"

RESERVE_TOKENS = 16384
KEEP_RECENT_TOKENS = 20000
"""The CLI's own defaults for compaction, lowered where the context window is small."""


CUT = "Response was truncated"

SERVER_NAME = re.compile(r"[A-Za-z0-9_-]+")


class PiSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harnesses `pi` and `pi_old`."""

    reasoning: bool = False
    """Declare the model a reasoning model: `reasoning_effort` is sent and the system message has
    the role `developer`."""
    thinking: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None
    """The effort, for a reasoning model; None: the CLI's own, medium."""
    tools: list[str] | None = None
    """Names of the tools offered; None: read, bash, edit, write."""
    append_system_prompt: str | None = None
    """Text added to the end of the system prompt."""

    def __post_init__(self) -> None:
        if self.thinking is not None and not self.reasoning:
            raise ValueError("thinking needs reasoning: true")
        if self.tools is not None and not all(name and "," not in name for name in self.tools):
            raise ValueError("tools must be a list of tool names, each without a comma")


class Pi:
    """Adapter for `pi -p`; the pack brings a Node of its own."""

    name: ClassVar[str] = "pi"
    pack: ClassVar[str | None] = "pi"
    Settings: ClassVar[type[msgspec.Struct]] = PiSettings
    has_mcp: ClassVar[bool] = True
    key: ClassVar[str] = f"${KEY_ENV}"
    """How its model list names an environment variable."""
    quiet: ClassVar[tuple[str, ...]] = ("--no-extensions",)
    """Its built-in extensions bring commands (/mcp, /llama) that an instruction may begin with."""

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, PiSettings)
        if agent.mcp_servers and not self.has_mcp:
            raise ValueError(f"agent.mcp_servers: {self.name} has no MCP support")
        config_dir = f"{context.home_dir}/.pi/agent"
        files = {
            f"{config_dir}/models.json": json.dumps(_models(settings, context, self.key), indent=1),
            f"{config_dir}/settings.json": json.dumps(_cli_settings(context), indent=1),
        }
        if agent.mcp_servers:
            if context.instruction.lstrip().startswith("/mcp"):
                raise ValueError(
                    "the instruction begins with /mcp, which pi takes for its own command when "
                    "it has MCP servers; begin it with another word"
                )
            files[f"{config_dir}/mcp.json"] = json.dumps(_mcp_config(agent.mcp_servers), indent=1)
        words = [
            f"{context.pack_dir}/bin/pi" if context.pack_dir else "pi",
            "--provider",
            PROVIDER,
            "--model",
            context.model_name,
            "-p",
            *self.quiet,
        ]
        if agent.mcp_servers:
            words += ["--extension", "builtin:mcp"]
        if settings.thinking is not None:
            words += ["--thinking", settings.thinking]
        if settings.tools is not None:
            words += ["--tools", ",".join(settings.tools)] if settings.tools else ["--no-tools"]
        if settings.append_system_prompt is not None:
            path = f"{config_dir}/append-system-prompt.txt"
            files[path] = settings.append_system_prompt
            words += ["--append-system-prompt", path]
        if agent.skills_path:
            words += ["--skill", agent.skills_path]
        return LaunchPlan(
            command=shlex.join(words),
            files=files,
            env={
                "HOME": context.home_dir,
                KEY_ENV: context.api_key,
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "PI_SKIP_VERSION_CHECK": "1",
                **agent.env,
            },
            cwd=context.workdir,
            native_logs=[f"{config_dir}/sessions"],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the exit status, which in text mode tells of a failed model call; stderr says why.

        A last answer that was cut at its output limit has a status of its own in no CLI but this
        one, and is the model's: the run is completed, with that reason.
        """
        if return_code == 1 and events.last_line(stderr_tail).startswith(CUT):
            return HarnessEnd(
                outcome="completed",
                reason="the last answer was cut at its output limit",
                return_code=return_code,
            )
        return events.by_status(self.name, return_code, stderr_tail)


class PiOld(Pi):
    """The last version under its former name, for comparisons with what was trained on it."""

    name: ClassVar[str] = "pi_old"
    pack: ClassVar[str | None] = "pi_old"
    has_mcp: ClassVar[bool] = False
    key: ClassVar[str] = KEY_ENV
    quiet: ClassVar[tuple[str, ...]] = ()


def _models(settings: PiSettings, context: LaunchContext, key: str) -> dict[str, object]:
    model = {
        "id": context.model_name,
        "name": context.model_name,
        "reasoning": settings.reasoning,
        "input": ["text"],
        "contextWindow": context.context_length,
        "maxTokens": context.max_output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{context.model_url}/v1",
        "api": "openai-completions",
        "apiKey": key,
        "models": [model],
    }
    return {"providers": {PROVIDER: provider}}


def _cli_settings(context: LaunchContext) -> dict[str, object]:
    quarter = context.context_length // 4
    return {
        "enableInstallTelemetry": False,
        "quietStartup": True,
        "compaction": {
            "reserveTokens": min(RESERVE_TOKENS, quarter),
            "keepRecentTokens": min(KEEP_RECENT_TOKENS, quarter),
        },
    }


def _mcp_config(servers: list[MCPServerSpec]) -> dict[str, Any]:
    return {"mcpServers": {server.name: _mcp_server(server) for server in servers}}


def _mcp_server(server: MCPServerSpec) -> dict[str, Any]:
    """Its tools are declared like built-in ones: the first request waits for the server, and the
    tool list stays the same over the run."""
    if not SERVER_NAME.fullmatch(server.name):
        raise ValueError(
            f"agent.mcp_servers: pi takes only letters, digits, _ and - in a server's name, "
            f"not {server.name!r}"
        )
    if server.transport == "stdio":
        return {"command": server.command, "args": server.args, "exposure": "direct"}
    if server.transport == "streamable-http":
        return {"url": server.url, "exposure": "direct"}
    raise ValueError(
        f"agent.mcp_servers: pi speaks stdio and streamable-http, "
        f"not {server.transport} ({server.name})"
    )
