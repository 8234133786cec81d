"""OpenAI Codex CLI (`codex exec`), which speaks the Responses API.

The configuration is the quietest that still works like the product: no update check, no telemetry,
no plug-in or app catalogues (those call home), no tools that a run without a person cannot use.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from harness_adapters import events, skills
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

KEY_ENV = "POLAR_MODEL_KEY"

PROVIDER = "gateway"
"""Not "OpenAI": that name switches on remote compaction and compressed request bodies."""

COMPACT_AT = 0.84
"""Part of the context window at which Codex compacts, leaving room for an answer."""

MCP_START_SECONDS = 60


class CodexSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `codex`."""

    multi_agent: bool = True
    """Offer the tools by which the model starts sub-agents."""
    reasoning_effort: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None
    """Sent as `reasoning.effort`; None sends none."""
    compact_at_tokens: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Compact when the reported usage passes this; None: 84 % of the context window."""


class Codex:
    """Adapter for `codex exec --json`; the pack holds the static binary, Node is not needed."""

    name: ClassVar[str] = "codex"
    pack: ClassVar[str | None] = "codex"
    Settings: ClassVar[type[msgspec.Struct]] = CodexSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, CodexSettings)
        config_dir = f"{context.home_dir}/.codex"
        program = f"{context.pack_dir}/bin/codex" if context.pack_dir else "codex"
        command = shlex.join(
            [
                program,
                "exec",
                "--json",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "-",
            ]
        )
        command = skills.linked(command, agent.skills_path, config_dir)
        return LaunchPlan(
            command=command,
            files={
                f"{config_dir}/config.toml": toml(_config(settings, agent.mcp_servers, context))
            },
            env={"HOME": context.home_dir, KEY_ENV: context.api_key, **agent.env},
            cwd=context.workdir,
            native_logs=[f"{config_dir}/sessions"],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the last `turn.completed` or `turn.failed`; without either by the exit status."""
        end = events.last_event(stdout_tail, ("turn.completed", "turn.failed"))
        if end is None:
            heard = _words(events.last_event(stdout_tail, ("error",)))
            return events.by_status(self.name, return_code, stderr_tail, heard)
        if end["type"] == "turn.completed":
            return HarnessEnd(outcome="completed", return_code=return_code)
        reason = events.quote("codex reported that its turn failed", _words(end.get("error")))
        return HarnessEnd(outcome="failed", reason=reason, return_code=return_code)


def _config(
    settings: CodexSettings, servers: list[MCPServerSpec], context: LaunchContext
) -> dict[str, Any]:
    compact_at = settings.compact_at_tokens or int(context.context_length * COMPACT_AT)
    effort = settings.reasoning_effort
    return {
        "model": context.model_name,
        "model_provider": PROVIDER,
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "model_context_window": context.context_length,
        "model_auto_compact_token_limit": compact_at,
        "model_reasoning_summary": "none",
        **({"model_reasoning_effort": effort} if effort else {}),
        "model_providers": {
            PROVIDER: {
                "name": PROVIDER,
                "base_url": f"{context.model_url}/v1",
                "env_key": KEY_ENV,
                "wire_api": "responses",
                "request_max_retries": 2,
                "stream_max_retries": 2,
                "stream_idle_timeout_ms": 1_800_000,
                "supports_websockets": False,
            }
        },
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "otel": {"exporter": "none"},
        "features": {
            "apps": False,
            "plugins": False,
            "remote_plugin": False,
            "goals": False,
            "shell_snapshot": False,
            "image_generation": False,
            "tool_suggest": False,
            "view_image": False,
            "multi_agent": settings.multi_agent,
        },
        "tools": {"experimental_request_user_input": {"enabled": False}},
        "skills": {"bundled": {"enabled": False}},
        "mcp_servers": {server.name: _mcp_server(server) for server in servers},
    }


def _mcp_server(server: MCPServerSpec) -> dict[str, Any]:
    """`required` makes a server that does not start the run's failure, not a silently shorter tool list."""
    common = {"required": True, "startup_timeout_sec": MCP_START_SECONDS}
    if server.transport == "stdio":
        return {"command": server.command, "args": server.args, **common}
    if server.transport == "streamable-http":
        return {"url": server.url, **common}
    raise ValueError(
        f"agent.mcp_servers: codex speaks stdio and streamable-http, "
        f"not {server.transport} ({server.name})"
    )


def _words(error: object) -> str:
    """What an error event says; a refused request carries the endpoint's JSON answer as text."""
    message = events.text(error, "message")
    return events.text(events.decoded(message), "error", "message") or message


def toml(table: Mapping[str, Any]) -> str:
    """Render nested tables of strings, numbers, booleans and lists of strings as TOML."""
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_string(key)} = {_value(value)}" for key, value in plain.items()]
    if path and lines:
        lines.insert(0, f"[{'.'.join(map(_string, path))}]")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*path, key))
    return lines


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _string(value)
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            raise TypeError(f"{value!r} has no place in a Codex configuration")


def _string(text: str) -> str:
    """A basic string: JSON's escapes are TOML's too, once DEL, which JSON leaves alone, is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
