"""Anthropic's Claude Code (`claude -p`), which speaks the Messages API.

The environment keeps its tool list and its prompt prefix the same over a whole run (no deferred
tools, no moving attribution header, no background agents) and keeps it from calling home.
"""

import json
import shlex
from typing import Annotated, Any, ClassVar

import msgspec

from harness_adapters import events, instruction, skills
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

SKILL_TOOL = "Skill"
"""The tool by which the model loads a skill; without it skills are invisible to the model."""

QUIET = {
    # Without this it refuses to run as root with permissions skipped.
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_WORKFLOWS": "1",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_MAX_RETRIES": "3",
    "API_TIMEOUT_MS": "3600000",
}


class ClaudeCodeSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `claude_code`."""

    tools: tuple[str, ...] = ("Agent", "Bash", "Edit", "Read", "Write", "Glob", "Grep")
    """Built-in tools offered to the model."""
    max_turns: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Stop after so many turns; None: no limit."""
    append_system_prompt: str | None = None
    """Text added to the end of the system prompt."""
    disable_thinking: bool = False
    bare: bool = False
    """The leanest variant: a one-line system prompt and of the tools only Bash, Edit and Read."""

    def __post_init__(self) -> None:
        if not all(name and "," not in name for name in self.tools):
            raise ValueError("tools must be a list of tool names, each without a comma")


class ClaudeCode:
    """Adapter for `claude -p --output-format stream-json`; the pack holds the native binary."""

    name: ClassVar[str] = "claude_code"
    pack: ClassVar[str | None] = "claude_code"
    Settings: ClassVar[type[msgspec.Struct]] = ClaudeCodeSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, ClaudeCodeSettings)
        if settings.bare and agent.skills_path:
            raise ValueError(
                "agent.settings.bare: a bare claude_code offers no skills to its model"
            )
        config_dir = f"{context.home_dir}/.claude"
        files: dict[str, str] = {}
        tools = settings.tools
        if agent.skills_path and SKILL_TOOL not in tools:
            tools = (*tools, SKILL_TOOL)
        words = [
            f"{context.pack_dir}/bin/claude" if context.pack_dir else "claude",
            "-p",
            "--output-format",
            "stream-json",
            "--verbose",
            "--dangerously-skip-permissions",
            "--tools",
            ",".join(tools),
        ]
        if settings.max_turns is not None:
            words += ["--max-turns", str(settings.max_turns)]
        if settings.bare:
            words.append("--bare")
        if settings.append_system_prompt is not None:
            path = f"{config_dir}/append-system-prompt.txt"
            files[path] = settings.append_system_prompt
            words += ["--append-system-prompt-file", path]
        if agent.mcp_servers:
            path = f"{config_dir}/mcp-servers.json"
            files[path] = json.dumps(_mcp_config(agent.mcp_servers), indent=1)
            words += ["--mcp-config", path, "--strict-mcp-config"]
        command = instruction.as_words(shlex.join(words), context.instruction)
        if agent.skills_path:
            home = shlex.join(["mkdir", "-p", config_dir])
            command = f"{home} && {skills.linked(command, agent.skills_path, config_dir)}"
        return LaunchPlan(
            command=command,
            files=files,
            env={
                "HOME": context.home_dir,
                "ANTHROPIC_BASE_URL": context.model_url,
                "ANTHROPIC_API_KEY": context.api_key,
                "ANTHROPIC_MODEL": context.model_name,
                "ANTHROPIC_SMALL_FAST_MODEL": context.model_name,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": context.model_name,
                "ANTHROPIC_DEFAULT_SONNET_MODEL": context.model_name,
                "ANTHROPIC_DEFAULT_OPUS_MODEL": context.model_name,
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length),
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_output_tokens),
                **QUIET,
                **({"CLAUDE_CODE_DISABLE_THINKING": "1"} if settings.disable_thinking else {}),
                **agent.env,
            },
            cwd=context.workdir,
            native_logs=[f"{config_dir}/projects"],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the `result` event, whose subtype says "success" of an API error: `is_error` counts.

        A run that reached `max_turns` did what its task asked and is completed, with that reason.
        An event that says neither how it ended nor that it failed leaves it to the exit status.
        """
        result = events.last_event(stdout_tail, ("result",)) or {}
        subtype, is_error = events.text(result, "subtype"), bool(result.get("is_error"))
        if not subtype and not is_error:
            return events.by_status(self.name, return_code, stderr_tail)
        if subtype == "error_max_turns":
            return events.turn_limit(return_code)
        if subtype == "success" and not is_error:
            return HarnessEnd(outcome="completed", return_code=return_code)
        how = "claude_code reported an error"
        return HarnessEnd(
            outcome="failed",
            reason=events.quote(
                how if subtype in ("", "success") else f"{how} ({subtype})", _words(result)
            ),
            return_code=return_code,
        )


def _words(result: dict[str, Any]) -> str:
    """What a result event says of its error: in `result`, else in the list `errors`."""
    errors = result.get("errors")
    listed = errors if isinstance(errors, list) else []
    return events.text(result, "result") or "; ".join(e for e in listed if isinstance(e, str))


def _mcp_config(servers: list[MCPServerSpec]) -> dict[str, Any]:
    return {"mcpServers": {server.name: _mcp_server(server) for server in servers}}


def _mcp_server(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": server.args}
    kind = "http" if server.transport == "streamable-http" else server.transport
    return {"type": kind, "url": server.url}
