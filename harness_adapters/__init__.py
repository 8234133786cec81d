"""Harness adapters: how each CLI agent is configured and started, and how its end is judged."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import msgspec

from harness_adapters.base import AgentSpec, HarnessAdapter, LaunchContext
from harness_adapters.claude_code import ClaudeCode
from harness_adapters.codex import Codex
from harness_adapters.gemini_cli import GeminiCli
from harness_adapters.opencode import Opencode
from harness_adapters.pi import Pi, PiOld
from harness_adapters.qwen_code import QwenCode
from harness_adapters.shell import Shell

ADAPTERS: dict[str, HarnessAdapter] = {
    "codex": Codex(),
    "claude_code": ClaudeCode(),
    "pi": Pi(),
    "pi_old": PiOld(),
    "gemini_cli": GeminiCli(),
    "qwen_code": QwenCode(),
    "opencode": Opencode(),
    "shell": Shell(),
}

GROUP = "polar.harness_adapters"

_SAMPLE = LaunchContext(
    session_id="sample",
    instruction="sample",
    model_name="sample",
    model_url="http://127.0.0.1:1",
    api_key="sample",
    session_dir="/polar/session",
    home_dir="/polar/session/home",
    log_dir="/polar/session/logs/agent",
    instruction_path="/polar/session/instruction.md",
)


def load_adapters() -> tuple[dict[str, HarnessAdapter], list[str]]:
    """Our adapters and those that installed packages bring along (entry points in GROUP).

    Returns them by name, and a sentence for each plug-in that was left out; a broken one harms no
    other. An entry point names an adapter's class, or an adapter.
    """
    adapters = dict(ADAPTERS)
    problems: list[str] = []
    for entry in entry_points(group=GROUP):
        where = f"{GROUP} plug-in {entry.name} ({entry.value})"
        try:
            plugin = entry.load()
            adapter = plugin() if isinstance(plugin, type) else plugin
        except Exception as error:  # a plug-in's import may raise anything; ours must live
            problems.append(f"{where} does not load: {type(error).__name__}: {error}")
            continue
        if wrong := _wrong(entry.name, adapter, adapters):
            problems.append(f"{where} {wrong}")
        else:
            adapters[entry.name] = adapter
    return adapters, problems


def get(agent: AgentSpec) -> HarnessAdapter:
    """The adapter that `agent` names; raises ValueError naming the field."""
    if agent.harness is None:
        raise ValueError(
            f"agent.import_path: {agent.import_path!r} is not offered; only an adapter that is "
            f"installed as a plug-in ({GROUP}) can be named, by agent.harness"
        )
    adapters = _adapters()
    if agent.harness not in adapters:
        known = ", ".join(sorted(adapters))
        raise ValueError(f"agent.harness: {agent.harness!r} is none of {known}")
    return adapters[agent.harness]


def check_settings(agent: AgentSpec) -> None:
    """Refuse what the harness cannot honour; raises ValueError naming the field of `agent`."""
    adapter = get(agent)
    check_fields(agent.settings, adapter)
    # Plans are pure, so what a plan refuses (an MCP transport, say) is learned by making one.
    adapter.plan(agent, _SAMPLE)


def check_fields(settings: Mapping[str, Any], adapter: HarnessAdapter) -> None:
    """Check `settings` against the adapter's struct; raises ValueError naming agent.settings.FIELD."""
    try:
        msgspec.convert(settings, adapter.Settings)
    except msgspec.ValidationError as error:
        message, _, inside = str(error).partition(" - at `$")
        field = "agent.settings" + inside.removesuffix("`")
        if unknown := re.search(r"unknown field `(.+)`$", message):
            known = ", ".join(adapter.Settings.__struct_fields__) or "no settings"
            field += f".{unknown[1]}"
            message = f"unknown setting of {adapter.name}, which knows {known}"
        raise ValueError(f"{field}: {message}") from error


@cache
def _adapters() -> dict[str, HarnessAdapter]:
    return load_adapters()[0]


def _wrong(name: str, adapter: Any, adapters: Mapping[str, HarnessAdapter]) -> str | None:
    if name in adapters:
        return "has the name of another adapter, which stays"
    if getattr(adapter, "name", None) != name:
        return f"calls itself {getattr(adapter, 'name', None)!r}"
    if not hasattr(adapter, "pack"):
        return "does not say which pack it needs (pack = None for none)"
    for method in ("plan", "ended"):
        if not callable(getattr(adapter, method, None)):
            return f"has no method {method}"
    settings = getattr(adapter, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, msgspec.Struct)):
        return "has no Settings that is a msgspec.Struct"
    if not settings.__struct_config__.forbid_unknown_fields:
        return "has Settings that let unknown fields pass"
    return None
