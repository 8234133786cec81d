"""What a builder is: completions in, trajectory out, nothing else touched."""

from typing import Any, ClassVar, Protocol

import msgspec

from builders.records import CompletionSession, Trajectory


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

    def __init__(self, config: Any) -> None: ...

    def build(self, session: CompletionSession) -> Trajectory: ...
