"""What a builder is: completions in, trajectory out, nothing else touched."""

import re
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from builders.eligible import OptionError, Options
from builders.records import CompletionSession, Trajectory

ConfigT = TypeVar("ConfigT")


class StrategySpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names a strategy and carries its settings; `config` is checked against its `Config`."""

    strategy: str
    config: dict[str, Any] = {}


class TrajectoryBuilder(Protocol):
    """A pure strategy that turns captured completions into training samples (paper §3.4).

    Constructed once a session with its checked `Config`; `build` must not do I/O and must not
    modify the completions.
    """

    name: ClassVar[str]
    Config: ClassVar[type[msgspec.Struct]]

    options: Options
    """What this builder declares eligible; `builders.check` holds it to that."""

    def __init__(self, config: Any) -> None: ...

    def build(self, session: CompletionSession) -> Trajectory: ...


class SpecError(ValueError):
    """A strategy that nobody offers, or settings that its `Config` refuses; `field` is the path."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def convert_config(config: dict[str, Any], to: type[ConfigT], path: str) -> ConfigT:
    """Check `config` against the struct `to`; raises SpecError naming `path.<field>`."""
    try:
        return msgspec.convert(config, to)
    except msgspec.ValidationError as error:
        if isinstance(wrong := error.__cause__, OptionError):
            raise SpecError(f"{path}.{wrong.field}", wrong.message) from error
        message, _, inside = str(error).partition(" - at `$")
        field = path + inside.removesuffix("`")
        if named := re.search(r"(?:unknown|required) field `(.+)`$", message):
            field += f".{named[1]}"
        raise SpecError(field, message) from error
