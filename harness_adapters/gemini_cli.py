"""Google's Gemini CLI (`gemini`), which speaks generateContent.

What asks a model of its own is off: the loop check, the next-speaker check, and the tools that
search and fetch by a Google model. Its context window cannot be told to it: it takes every model
for one of 1,048,576 tokens and never compacts in a run like this, so a request that does not fit
ends the run.
"""

import json
import shlex
from typing import Annotated, Any, ClassVar

import msgspec

from harness_adapters import events, gemini_family, instruction, skills
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

SIDE_CALL_TOOLS = ("google_web_search", "web_fetch")


class GeminiCliSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `gemini_cli`."""

    tools: list[str] | None = None
    """Built-in tools offered; None: all but google_web_search and web_fetch."""
    max_turns: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Stop after so many turns; None: no limit."""

    def __post_init__(self) -> None:
        if self.tools is not None and not (self.tools and all(self.tools)):
            raise ValueError("tools must name at least one tool")


class GeminiCli:
    """Adapter for `gemini --output-format stream-json`; the pack brings a Node of its own."""

    name: ClassVar[str] = "gemini_cli"
    pack: ClassVar[str | None] = "gemini_cli"
    Settings: ClassVar[type[msgspec.Struct]] = GeminiCliSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, GeminiCliSettings)
        config_dir = f"{context.home_dir}/.gemini"
        command = shlex.join(
            [
                f"{context.pack_dir}/bin/gemini" if context.pack_dir else "gemini",
                "-m",
                context.model_name,
                "--yolo",
                "--output-format",
                "stream-json",
            ]
        )
        files = {
            f"{config_dir}/settings.json": json.dumps(
                _cli_settings(settings, agent.mcp_servers), indent=1
            )
        }
        if gemini_family.wants_command(context.instruction):
            # JSON's escapes are TOML's too, once DEL, which JSON leaves alone, is escaped.
            text = json.dumps(context.instruction, ensure_ascii=False).replace("\x7f", "\\u007f")
            files[f"{config_dir}/commands/{gemini_family.COMMAND}.toml"] = f"prompt = {text}\n"
            command = gemini_family.as_command(command)
        else:
            command = instruction.as_words(command, context.instruction)
        command = skills.linked(command, agent.skills_path, config_dir)
        return LaunchPlan(
            command=command,
            files=files,
            env={
                "HOME": context.home_dir,
                "GEMINI_API_KEY": context.api_key,
                "GOOGLE_GEMINI_BASE_URL": context.model_url,
                "GEMINI_TELEMETRY_ENABLED": "false",
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
                # It would start itself again as a child, and the parent ignores signals.
                "GEMINI_CLI_NO_RELAUNCH": "true",
                "TERM": "xterm-256color",
                **agent.env,
            },
            cwd=context.workdir,
            native_logs=[f"{config_dir}/tmp"],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the `result` event: an `error` in it is a failed call, whatever the exit status says.

        A run that gave up on the model's own answers (empty ones, a full context, the turn limit)
        did what the model made of its task and is completed, with that reason.
        """
        result = events.last_event(stdout_tail, ("result",))
        heard = events.text(events.last_event(stdout_tail, ("error",)), "message")
        if return_code == gemini_family.TURN_LIMIT_STATUS:
            return events.turn_limit(return_code)
        if result is None:
            return events.by_status(self.name, return_code, stderr_tail, heard)
        message = events.text(result, "error", "message")
        if message or (return_code != 0 and events.text(result, "status") == "error"):
            reason = events.quote("gemini_cli reported an error", _words(message) or heard)
            return HarnessEnd(outcome="failed", reason=reason, return_code=return_code)
        last = events.last_event(stdout_tail, ("message", "tool_result", "error")) or {}
        reason = events.quote("gemini_cli stopped", heard) if last.get("type") == "error" else ""
        return HarnessEnd(outcome="completed", reason=reason, return_code=return_code)


def _cli_settings(settings: GeminiCliSettings, servers: list[MCPServerSpec]) -> dict[str, Any]:
    tools = (
        {"exclude": list(SIDE_CALL_TOOLS)} if settings.tools is None else {"core": settings.tools}
    )
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "security": {
            "auth": {"selectedType": "gemini-api-key"},
            "folderTrust": {"enabled": False},
        },
        "model": {
            "disableLoopDetection": True,
            "skipNextSpeakerCheck": True,
            **({"maxSessionTurns": settings.max_turns} if settings.max_turns else {}),
        },
        "context": {"fileFiltering": {"enableRecursiveFileSearch": False}},
        "tools": tools,
        "mcpServers": {server.name: gemini_family.mcp_server(server) for server in servers},
    }


def _words(message: str) -> str:
    """What an error says; that of a refused request holds the endpoint's JSON: `[API Error: {...}]`."""
    answer = events.decoded(message[message.find("{") :].removesuffix("]"))
    return events.text(answer, "error", "message") or message
