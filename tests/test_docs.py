"""What the documentation shows is what the code says. `python -m tests.test_docs` writes it anew."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from builders.findings import REGISTRY, Scope
from polar_gateway.config import (
    BackendConfig,
    CompletionPersistence,
    GatewayConfig,
    InferenceConfig,
    JournalConfig,
    ModelCallConfig,
    NodeConfig,
)
from polar_gateway.lifecycle import TRANSITIONS
from polar_server.config import RetryConfig, RolloutConfig, load_topology
from polar_server.protocol import TaskRequest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
TASKS = sorted((ROOT / "examples/tasks").iterdir())

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "rollout": RolloutConfig,
    "rollout.retry": RetryConfig,
    "gateway": GatewayConfig,
    "gateway.completion_persistence": CompletionPersistence,
    "gateway.nodes[]": NodeConfig,
    "gateway.nodes[].inference": InferenceConfig,
    "gateway.nodes[].inference.backends[]": BackendConfig,
    "gateway.nodes[].journal": JournalConfig,
    "gateway.nodes[].model_calls": ModelCallConfig,
}
MADE_DEFAULTS = {"id": "the host's name"}
"""Defaults that are worked out where the service starts."""


def stage_diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> queued"]
    for stage, following in TRANSITIONS.items():
        order = [later for later in TRANSITIONS if later in following]
        lines += [f"    {stage} --> {later}" for later in order]
        if not following:
            lines.append(f"    {stage} --> [*]")
    return "\n".join([*lines, "```"])


def configuration_tables() -> str:
    return "\n\n".join(
        f"### `{section}`\n\n| key | default | meaning |\n|---|---|---|\n"
        + "\n".join(_rows(document))
        for section, document in SECTIONS.items()
    )


def finding_tables() -> str:
    titles: dict[Scope, str] = {
        "completion": "Of one model call",
        "session": "Of the whole session",
    }
    return "\n\n".join(
        f"### {title}\n\n| code | level | what it means | what to do |\n|---|---|---|---|\n"
        + "\n".join(
            f"| `{code}` | {one.level} | {one.meaning} | {one.action} |"
            for code, one in REGISTRY.items()
            if one.scope == scope
        )
        for scope, title in titles.items()
    )


def _rows(document: type[msgspec.Struct]) -> Iterator[str]:
    meanings = _docstrings(document)
    for field in msgspec.structs.fields(document):
        if field.type in SECTIONS.values() or field.name == "nodes":
            continue
        if field.default is not msgspec.NODEFAULT:
            default = f"`{msgspec.json.encode(field.default).decode()}`"
        elif field.required:
            default = "required"
        elif field.name in MADE_DEFAULTS:
            default = MADE_DEFAULTS[field.name]
        else:
            assert callable(field.default_factory)
            default = f"`{msgspec.json.encode(field.default_factory()).decode()}`"
        yield f"| `{field.name}` | {default} | {meanings.get(field.name, '')} |"


def _docstrings(document: type[msgspec.Struct]) -> dict[str, str]:
    """The text that stands under each field of a struct."""
    (found,) = ast.parse(inspect.getsource(document)).body
    assert isinstance(found, ast.ClassDef)
    said: dict[str, str] = {}
    for field, after in zip(found.body, found.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            said[field.target.id] = " ".join(str(after.value.value).split())
    return said


GENERATED: dict[str, tuple[Path, Callable[[], str]]] = {
    "stages": (DOCS / "architecture.md", stage_diagram),
    "keys": (DOCS / "configuration.md", configuration_tables),
    "findings": (DOCS / "verdicts.md", finding_tables),
}


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated -->\n).*?(\n<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_part_is_current(name: str) -> None:
    page, render = GENERATED[name]
    found = _between(name).search(page.read_text())
    assert found is not None
    assert found[0] == found[1] + render() + found[2], "run `python -m tests.test_docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("file", TASKS, ids=lambda file: file.name)
def test_an_example_task_is_a_task(file: Path) -> None:
    msgspec.convert(yaml.safe_load(file.read_text()), TaskRequest)


def test_the_example_topology_is_a_topology() -> None:
    topology = load_topology(ROOT / "examples/topology.yaml")
    assert topology.gateway.nodes


def test_every_decision_is_listed() -> None:
    index = (DOCS / "decisions/README.md").read_text()
    missing = [
        page.name
        for page in (DOCS / "decisions").glob("*.md")
        if page.name not in index and page.name != "README.md"
    ]
    assert not missing


def write() -> None:
    for name, (page, render) in GENERATED.items():
        text = page.read_text()
        page.write_text(_between(name).sub(lambda found: found[1] + render() + found[2], text))  # noqa: B023


if __name__ == "__main__":
    write()
