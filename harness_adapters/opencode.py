"""opencode (`opencode run`), which is configured here to speak Chat Completions.

It is told a title, since it would otherwise ask the model for one first, and everything that it
would fetch from elsewhere at its start (models, plug-ins, language servers) is off.
"""

import json
import shlex
from typing import Any, ClassVar

import msgspec

from harness_adapters import events
from harness_adapters.base import AgentSpec, HarnessEnd, LaunchContext, LaunchPlan, MCPServerSpec

PROVIDER = "gateway"

TITLE = "task"

KEY_ENV = "POLAR_MODEL_KEY"

QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_PURE": "1",
    "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
    "OPENCODE_DISABLE_CLAUDE_CODE": "1",
}


class OpencodeSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the harness `opencode`."""

    exclude_tools: list[str] = []
    """Built-in tools that are not offered to the model."""
    append_system_prompt: str | None = None
    """Text added to the end of the system prompt."""


class Opencode:
    """Adapter for `opencode run --format json`; the pack holds the native binary."""

    name: ClassVar[str] = "opencode"
    pack: ClassVar[str | None] = "opencode"
    Settings: ClassVar[type[msgspec.Struct]] = OpencodeSettings

    def plan(self, agent: AgentSpec, context: LaunchContext) -> LaunchPlan:
        settings = msgspec.convert(agent.settings, OpencodeSettings)
        config_dir = f"{context.home_dir}/.config/opencode"
        data_dir = f"{context.home_dir}/.local/share/opencode"
        config = _config(settings, agent, context)
        # At its start it fetches a package for plug-ins into this folder, and does without it. The
        # setting is for this folder alone: the agent's own npm commands must not see it.
        files = {f"{config_dir}/.npmrc": "offline=true\n"}
        if settings.append_system_prompt is not None:
            path = f"{config_dir}/append-system-prompt.md"
            files[path] = settings.append_system_prompt
            config["instructions"] = [path]
        files[f"{config_dir}/opencode.json"] = json.dumps(config, indent=1)
        words = [
            f"{context.pack_dir}/bin/opencode" if context.pack_dir else "opencode",
            "run",
            "--format",
            "json",
            "--model",
            f"{PROVIDER}/{context.model_name}",
            "--title",
            TITLE,
        ]
        return LaunchPlan(
            command=shlex.join(words),
            files=files,
            env={"HOME": context.home_dir, KEY_ENV: context.api_key, **QUIET, **agent.env},
            cwd=context.workdir,
            native_logs=[
                f"{data_dir}/{name}" for name in ("opencode.db", "opencode.db-wal", "log")
            ],
        )

    def ended(self, return_code: int | None, stdout_tail: bytes, stderr_tail: bytes) -> HarnessEnd:
        """By the last event: an `error` with no step finished after it ended the run.

        One that was got over leaves the exit status 1 behind, so a run whose last step ended with
        an answer is completed with that status too.
        """
        last = events.last_event(stdout_tail, ("error", "step_finish")) or {}
        if last.get("type") == "error":
            error = last.get("error")
            reason = events.text(error, "data", "message") or events.text(error, "name")
            return HarnessEnd(
                outcome="failed",
                reason=events.quote("opencode reported an error", reason),
                return_code=return_code,
            )
        answered = events.text(last, "part", "reason") in ("stop", "length")
        if return_code == 1 and answered:
            return HarnessEnd(outcome="completed", return_code=return_code)
        return events.by_status(self.name, return_code, stderr_tail)


def _config(settings: OpencodeSettings, agent: AgentSpec, context: LaunchContext) -> dict[str, Any]:
    model = f"{PROVIDER}/{context.model_name}"
    entry = {
        "name": context.model_name,
        "tool_call": True,
        "reasoning": False,
        "limit": {"context": context.context_length, "output": context.max_output_tokens},
    }
    return {
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "lsp": False,
        "formatter": False,
        "model": model,
        "small_model": model,
        "enabled_providers": [PROVIDER],
        "permission": {
            "*": "allow",
            "edit": "allow",
            "bash": "allow",
            "webfetch": "allow",
            "external_directory": "allow",
            "doom_loop": "allow",
            **dict.fromkeys(settings.exclude_tools, "deny"),
        },
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {
                    "baseURL": f"{context.model_url}/v1",
                    "apiKey": f"{{env:{KEY_ENV}}}",
                },
                "models": {context.model_name: entry},
            }
        },
        "mcp": {server.name: _mcp_server(server) for server in agent.mcp_servers},
        **({"skills": {"paths": [agent.skills_path]}} if agent.skills_path else {}),
    }


def _mcp_server(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "local", "command": [server.command, *server.args], "enabled": True}
    return {"type": "remote", "url": server.url, "enabled": True, "oauth": False}
