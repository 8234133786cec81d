"""Builders: the strategies that turn the completions of a session into a trajectory."""

from builders import plugins
from builders.base import SpecError, StrategySpec, TrajectoryBuilder, convert_config
from builders.lineage import Lineage
from builders.per_request import PerRequest
from builders.prefix_merging import PrefixMerging

BUILDERS: dict[str, type[TrajectoryBuilder]] = {
    "per_request": PerRequest,
    "prefix_merging": PrefixMerging,
    "lineage": Lineage,
}


def load_builders() -> tuple[dict[str, type[TrajectoryBuilder]], list[str]]:
    """Add installed plug-ins (entry points `polar.builders`) to BUILDERS; called at start.

    Returns BUILDERS and a sentence for each plug-in that was left out.
    """
    return BUILDERS, plugins.load("polar.builders", BUILDERS, "build")


def make(spec: StrategySpec) -> TrajectoryBuilder:
    """The builder that `spec` names, its settings checked; raises SpecError (a ValueError)."""
    if spec.strategy not in BUILDERS:
        raise SpecError(
            "builder.strategy", f"{spec.strategy!r} is none of {', '.join(sorted(BUILDERS))}"
        )
    builder = BUILDERS[spec.strategy]
    return builder(convert_config(spec.config, builder.Config, "builder.config"))
