import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import harness_adapters
from harness_adapters.base import AgentSpec
from tests.harness_adapters.samples import CONTEXT, KEY, agent, context

CLIS = tuple(name for name in harness_adapters.ADAPTERS if name != "shell")

PLUGIN = """
import msgspec
from harness_adapters.base import HarnessEnd, LaunchPlan

class Settings(msgspec.Struct, forbid_unknown_fields=True):
    depth: int = 1

class Mine:
    name = "mine"
    pack = None
    Settings = Settings
    def plan(self, agent, context):
        return LaunchPlan(command="true")
    def ended(self, return_code, stdout_tail, stderr_tail):
        return HarnessEnd(outcome="completed")

class Misnamed(Mine):
    name = "other"

class Lax(Mine):
    name = "lax"
    class Settings(msgspec.Struct):
        pass

class Half:
    name = "half"
    pack = None
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Install a distribution whose adapters are those of PLUGIN, under the given entry points."""

    def install(entries: dict[str, str]) -> None:
        (tmp_path / "polar_test_plugin.py").write_text(PLUGIN)
        info = tmp_path / "polar_test_plugin-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: polar-test-plugin\nVersion: 1\n"
        )
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{harness_adapters.GROUP}]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "polar_test_plugin", raising=False)

    return install


def test_every_adapter_is_registered_under_its_own_name() -> None:
    for name, adapter in harness_adapters.ADAPTERS.items():
        assert adapter.name == name
        assert adapter.Settings.__struct_config__.forbid_unknown_fields


def test_a_plug_in_joins_the_adapters(plug_ins: Callable[[dict[str, str]], None]) -> None:
    plug_ins({"mine": "polar_test_plugin:Mine"})
    adapters, problems = harness_adapters.load_adapters()
    assert problems == []
    assert set(adapters) == {*CLIS, "mine", "shell"}
    assert "mine" not in harness_adapters.ADAPTERS


def test_a_broken_plug_in_is_reported_and_harms_no_other(
    plug_ins: Callable[[dict[str, str]], None],
) -> None:
    plug_ins(
        {
            "gone": "polar_test_plugin:Gone",
            "named": "polar_test_plugin:Misnamed",
            "lax": "polar_test_plugin:Lax",
            "half": "polar_test_plugin:Half",
            "codex": "polar_test_plugin:Mine",
            "mine": "polar_test_plugin:Mine",
        }
    )
    adapters, problems = harness_adapters.load_adapters()
    assert "mine" in adapters
    assert adapters["codex"] is harness_adapters.ADAPTERS["codex"]
    said = "\n".join(sorted(problems))
    assert len(problems) == 5
    assert "plug-in gone (polar_test_plugin:Gone) does not load: AttributeError" in said
    assert "plug-in named (polar_test_plugin:Misnamed) calls itself 'other'" in said
    assert "plug-in lax (polar_test_plugin:Lax) has Settings that let unknown fields pass" in said
    assert "plug-in half (polar_test_plugin:Half) has no method plan" in said
    assert "plug-in codex (polar_test_plugin:Mine) has the name of another adapter" in said


def test_an_unknown_harness_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"agent\.harness: 'codx' is none of claude_code, codex"):
        harness_adapters.check_settings(agent("codx"))


def test_an_import_path_is_not_imported() -> None:
    with pytest.raises(ValueError, match=r"agent\.import_path: 'os:system' is not offered"):
        harness_adapters.check_settings(AgentSpec(import_path="os:system"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            agent("codex", settings={"multiagent": True}),
            r"agent\.settings\.multiagent: unknown setting of codex, which knows multi_agent, ",
        ),
        (
            agent("claude_code", settings={"max_turns": "7"}),
            r"agent\.settings\.max_turns: Expected `int \| null`, got `str`",
        ),
        (agent("claude_code", settings={"max_turns": 0}), r"agent\.settings\.max_turns: Expected"),
        (agent("pi", settings={"thinking": "high"}), r"agent\.settings: thinking needs reasoning"),
        (
            agent("shell", custom_shell={"command": "x"}, settings={"a": 1}),
            r"agent\.settings\.a: unknown setting of shell, which knows no settings",
        ),
        (
            agent("pi_old", mcp_servers=[{"name": "a", "command": "x"}]),
            r"agent\.mcp_servers: pi_old has no MCP",
        ),
        (agent("gemini_cli", settings={"tools": []}), r"agent\.settings: tools must name at least"),
        (
            agent("qwen_code", settings={"reasoning_effort": "huge"}),
            r"agent\.settings\.reasoning_effort: Invalid enum value",
        ),
        (
            agent("opencode", settings={"title": "x"}),
            r"agent\.settings\.title: unknown setting of opencode",
        ),
        (
            agent("shell", custom_shell={"command": "x '{instruction}'"}),
            r"agent\.custom_shell\.command",
        ),
    ],
)
def test_what_a_harness_cannot_honour_is_refused_by_field(spec: AgentSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness_adapters.check_settings(spec)


def test_good_settings_pass() -> None:
    harness_adapters.check_settings(agent("codex", settings={"reasoning_effort": "low"}))
    harness_adapters.check_settings(agent("pi", settings={"reasoning": True, "thinking": "low"}))


@pytest.mark.parametrize("harness", CLIS)
def test_the_instruction_is_in_no_command_and_no_environment(harness: str) -> None:
    for instruction in ("Fix the bug.", "/clear " + "x" * 1_000_000):
        where = context(instruction=instruction)
        plan = harness_adapters.ADAPTERS[harness].plan(agent(harness), where)
        assert "Fix the bug" not in plan.command
        assert len(plan.command) < 1000
        assert instruction not in plan.env.values()


@pytest.mark.parametrize("harness", CLIS)
def test_the_key_is_in_no_command(harness: str) -> None:
    plan = harness_adapters.ADAPTERS[harness].plan(agent(harness), CONTEXT)
    assert KEY not in plan.command
    assert KEY in plan.env.values()


@pytest.mark.parametrize("harness", CLIS)
def test_every_file_and_log_lies_in_the_private_home(harness: str) -> None:
    spec = agent(harness, settings={})
    plan = harness_adapters.ADAPTERS[harness].plan(spec, CONTEXT)
    for path in (*plan.files, *plan.native_logs):
        assert path.startswith("/polar/session/home/")
    assert plan.env["HOME"] == "/polar/session/home"


def test_settings_have_a_json_schema() -> None:
    for adapter in harness_adapters.ADAPTERS.values():
        assert msgspec.json.schema(adapter.Settings)
