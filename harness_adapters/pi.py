"""Pi (`pi -p`), which is configured here to speak Chat Completions.

It runs in text mode. In its JSON mode the exit status is 0 also after a fatal error and each token
prints the whole message so far, twice (83 MB for an answer of 4,000 tokens); in text mode the
status is honest, stderr says what happened, and the session file in its HOME has every event.
"""

import json
import shlex
from typing import ClassVar, Literal

import msgspec

from harness_adapters import events
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan

KEY_ENV = "POLAR_MODEL_KEY"

PROVIDER = "gateway"

RESERVE_TOKENS = 16384
KEEP_RECENT_TOKENS = 20000
"""The CLI's own defaults for compaction, lowered where the context window is small."""


class PiSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `pi`."""

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
    """Adapter for `pi -p`; the pack brings a Node of its own. It knows no MCP."""

    name: ClassVar[str] = "pi"
    pack: ClassVar[str | None] = "pi"
    Settings: ClassVar[type[msgspec.Struct]] = PiSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, PiSettings)
        if agent.mcp_servers:
            raise ValueError("agent.mcp_servers: pi has no MCP support")
        config_dir = f"{context.home_dir}/.pi/agent"
        files = {
            f"{config_dir}/models.json": json.dumps(_models(settings, context), indent=1),
            f"{config_dir}/settings.json": json.dumps(_cli_settings(context), indent=1),
        }
        words = [
            f"{context.pack_dir}/bin/pi" if context.pack_dir else "pi",
            "--provider",
            PROVIDER,
            "--model",
            context.model_name,
            "-p",
        ]
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
        """By the exit status, which in text mode tells of a failed model call; stderr says why."""
        return events.by_status(self.name, return_code, stderr_tail)


def _models(settings: PiSettings, context: LaunchContext) -> dict[str, object]:
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
        "apiKey": KEY_ENV,
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
