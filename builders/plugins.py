"""Strategies that installed packages bring along, found through entry points.

A plug-in that cannot be used is reported in a sentence and left out; the others still load.
"""

from importlib.metadata import entry_points
from typing import Any

import msgspec


def load(group: str, registry: dict[str, Any], method: str) -> list[str]:
    """Add the usable plug-ins of the entry-point `group` to `registry`; return what was wrong.

    A plug-in is a class with `name`, `Config` (a msgspec.Struct that forbids unknown fields) and
    `method`. Loading twice changes nothing.
    """
    problems = []
    for entry in entry_points(group=group):
        where = f"{group} plug-in {entry.name} ({entry.value})"
        try:
            plugin = entry.load()
        except (
            Exception
        ) as error:  # whatever its import raises is its own; it must not take us down
            problems.append(f"{where} does not import: {type(error).__name__}: {error}")
            continue
        wrong = _wrong(entry.name, plugin, registry, method)
        if wrong is None:
            registry[entry.name] = plugin
        else:
            problems.append(f"{where} {wrong}")
    return problems


def _wrong(name: str, plugin: Any, registry: dict[str, Any], method: str) -> str | None:
    if registry.get(name, plugin) is not plugin:
        return "has the name of another strategy, which stays"
    if getattr(plugin, "name", None) != name:
        return f"calls itself {getattr(plugin, 'name', None)!r}"
    if not callable(getattr(plugin, method, None)):
        return f"has no method {method}"
    config = getattr(plugin, "Config", None)
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        return "has no Config that is a msgspec.Struct"
    if not config.__struct_config__.forbid_unknown_fields:
        return "has a Config that lets unknown fields pass"
    return None
