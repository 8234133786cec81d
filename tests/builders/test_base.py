from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import builders
from builders.base import SpecError, StrategySpec
from builders.chains import Beginning
from builders.junctions import Refusal
from builders.records import Span
from tests.builders.world import World, play

DOCS = Path(__file__).parents[2] / "docs" / "builders.md"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kindz": ["turn"]}, "builder.config.kindz"),
        ({"kinds": "turn"}, "builder.config.kinds"),
        ({"kinds": ["turn", 1]}, "builder.config.kinds[1]"),
        ({"end_of_turn_ids": ["<|im_end|>"]}, "builder.config.end_of_turn_ids[0]"),
        ({"max_tokens": 0}, "builder.config.max_tokens"),
        ({"strict": ["undelivered", "to_strict"]}, "builder.config.strict[1]"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path(config: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        builders.make(StrategySpec(strategy="prefix_merging", config=config))
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")
    assert isinstance(refused.value, ValueError)


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SpecError, match=r"builder\.strategy: 'magic' is none of lineage, per_request, prefix"
    ):
        builders.make(StrategySpec(strategy="magic"))


def test_settings_reach_the_builder() -> None:
    builder = builders.make(StrategySpec(strategy="per_request", config={"kinds": ["title"]}))
    assert builder.options.kinds == ("title",)


def test_a_code_that_is_no_finding_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        SpecError, match=r"'mixed' is no finding; there are .*mixed_policy_versions"
    ):
        builders.make(StrategySpec(strategy="lineage", config={"strict": ["mixed"]}))


def test_the_documentation_names_all_that_can_be_set_and_all_that_a_trace_says() -> None:
    world = World()
    play(world, ["turn"])
    known = {field.name for field in msgspec.structs.fields(Span)} | set(get_args(Refusal))
    known |= {name for each in get_args(Beginning) for name in get_args(each)}
    for name, builder in builders.BUILDERS.items():
        known |= {name, *(field.name for field in msgspec.structs.fields(builder.Config))}
        (trace,) = builders.make(StrategySpec(strategy=name)).build(world.session()).traces
        known |= trace.metadata.keys()
    documented = DOCS.read_text()
    assert [name for name in sorted(known) if f"`{name}`" not in documented] == []
