"""Qwen Code (`qwen`), which is configured here to speak Chat Completions.

What asks the model beside the task is off: the memory, skill and next-speaker checks after it, and
the tool that has a page read by the model. So is what would reach other runs on the machine:
sessions that send each other messages.
"""

import json
import shlex
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from harness_adapters import events, gemini_family, instruction, skills
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

GAVE_UP = ("Loop detection halted the run", "Model stream ended with empty response text")
"""What it says when it stops because of what the model said, not because a call failed."""


class QwenCodeSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `qwen_code`."""

    exclude_tools: tuple[str, ...] = ("web_fetch",)
    """Built-in tools that are not offered; web_fetch asks the model in a call of its own."""
    max_turns: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Stop after so many turns; None: no limit."""
    reasoning_effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Sent as `reasoning_effort`; None sends none."""
    append_system_prompt: str | None = None
    """Text added to the end of the system prompt."""


class QwenCode:
    """Adapter for `qwen --output-format stream-json`; the pack brings a Node of its own."""

    name: ClassVar[str] = "qwen_code"
    pack: ClassVar[str | None] = "qwen_code"
    Settings: ClassVar[type[msgspec.Struct]] = QwenCodeSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, QwenCodeSettings)
        config_dir = f"{context.home_dir}/.qwen"
        words = [
            f"{context.pack_dir}/bin/qwen" if context.pack_dir else "qwen",
            "--auth-type",
            "openai",
            "--yolo",
            "--output-format",
            "stream-json",
        ]
        if settings.append_system_prompt is not None:
            words += ["--append-system-prompt", settings.append_system_prompt]
        command = shlex.join(words)
        files = {
            f"{config_dir}/settings.json": json.dumps(
                _cli_settings(settings, agent.mcp_servers, context), indent=1
            )
        }
        if gemini_family.wants_command(context.instruction):
            # Without the mark it would be offered to the model as one of its skills.
            path = f"{config_dir}/commands/{gemini_family.COMMAND}.md"
            files[path] = f"---\ndisable-model-invocation: true\n---\n{context.instruction}"
            command = gemini_family.as_command(command)
        else:
            command = instruction.as_words(command, context.instruction)
        command = skills.linked(command, agent.skills_path, config_dir)
        return LaunchPlan(
            command=command,
            files=files,
            env={
                "HOME": context.home_dir,
                "OPENAI_API_KEY": context.api_key,
                "OPENAI_BASE_URL": f"{context.model_url}/v1",
                "OPENAI_MODEL": context.model_name,
                "QWEN_TELEMETRY_ENABLED": "false",
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(context.max_output_tokens),
                **agent.env,
            },
            cwd=context.workdir,
            native_logs=[f"{config_dir}/projects"],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the `result` event's `is_error`; without one by the exit status.

        A run that gave up on the model's own answers (empty ones, the same call over and over, the
        turn limit) did what the model made of its task and is completed, with that reason.
        """
        result = events.last_event(stdout_tail, ("result",))
        if return_code == gemini_family.TURN_LIMIT_STATUS:
            return events.turn_limit(return_code)
        if result is None or not isinstance(result.get("is_error"), bool):
            return events.by_status(self.name, return_code, stderr_tail)
        if not result["is_error"]:
            return HarnessEnd(outcome="completed", return_code=return_code)
        message = events.text(result, "error", "message") or events.text(result, "result")
        if any(words in message for words in GAVE_UP):
            return HarnessEnd(
                outcome="completed",
                reason=events.quote("qwen_code stopped", message),
                return_code=return_code,
            )
        return HarnessEnd(
            outcome="failed",
            reason=events.quote("qwen_code reported an error", message),
            return_code=return_code,
        )


def _cli_settings(
    settings: QwenCodeSettings, servers: list[MCPServerSpec], context: LaunchContext
) -> dict[str, Any]:
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
        "agents": {"crossSessionMessaging": False},
        "memory": {
            "enableManagedAutoMemory": False,
            "enableManagedAutoDream": False,
            "enableAutoSkill": False,
        },
        "model": {
            "skipLoopDetection": True,
            "skipNextSpeakerCheck": True,
            **({"maxSessionTurns": settings.max_turns} if settings.max_turns else {}),
            **({"reasoningEffort": settings.reasoning_effort} if settings.reasoning_effort else {}),
            "generationConfig": {"contextWindowSize": context.context_length},
        },
        "context": {"fileFiltering": {"enableRecursiveFileSearch": False}},
        "tools": {
            # Without a terminal of its own it loses output of commands on a busy machine.
            "shell": {"enableInteractiveShell": True},
            "disabled": list(settings.exclude_tools),
        },
        # Their tools are declared from the start, not looked up by the model through a tool search.
        "mcpServers": {
            server.name: gemini_family.mcp_server(server, alwaysLoadTools=True)
            for server in servers
        },
    }
