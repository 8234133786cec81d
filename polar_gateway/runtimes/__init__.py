"""Runtimes: the isolation backends that a session can run in."""

from importlib.metadata import entry_points
from typing import Any

from polar_gateway.runtimes.base import Runtime
from polar_gateway.runtimes.docker import DockerRuntime
from polar_gateway.runtimes.local import LocalRuntime

RUNTIMES: dict[str, type[Runtime]] = {
    "docker": DockerRuntime,
    "local": LocalRuntime,
}

GROUP = "polar.runtimes"


def load_runtimes() -> tuple[dict[str, type[Runtime]], list[str]]:
    """Our runtimes and those that installed packages bring along (entry points in GROUP).

    Returns them by name, and a sentence for each plug-in that was left out; a broken one harms no
    other.
    """
    runtimes = dict(RUNTIMES)
    problems: list[str] = []
    for entry in entry_points(group=GROUP):
        where = f"{GROUP} plug-in {entry.name} ({entry.value})"
        try:
            plugin = entry.load()
        except (
            Exception
        ) as error:  # whatever its import raises is its own; it must not take us down
            problems.append(f"{where} does not load: {type(error).__name__}: {error}")
            continue
        if wrong := _wrong(entry.name, plugin, runtimes):
            problems.append(f"{where} {wrong}")
        else:
            runtimes[entry.name] = plugin
    return runtimes, problems


def _wrong(name: str, plugin: Any, runtimes: dict[str, type[Runtime]]) -> str | None:
    if name in runtimes:
        return "has the name of another runtime, which stays"
    if not (isinstance(plugin, type) and issubclass(plugin, Runtime)):
        return "is no subclass of Runtime"
    if getattr(plugin, "name", None) != name:
        return f"calls itself {getattr(plugin, 'name', None)!r}"
    if not isinstance(getattr(plugin, "isolated", None), bool):
        return "does not say whether it is isolated"
    if plugin.__abstractmethods__:
        return f"lacks {', '.join(sorted(plugin.__abstractmethods__))}"
    return None
