"""What a model call is for: a turn of a conversation, or one of a harness's side calls."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from polar_gateway.dialects.turn import ModelRequest

TURN = "turn"


class Rule(NamedTuple):
    """A side call as it was recorded; a call must match in every part."""

    kind: str
    agent: str
    """What the `user-agent` header begins with."""
    tools: bool
    """Whether tools are offered."""
    system: str = ""
    """What the system prompt begins with."""
    last: str = ""
    """What the text of the last message begins with."""


RULES = (
    Rule("title", "opencode/", tools=False, system="You are a title generator. You output ONLY "),
)


def classify(request: ModelRequest, dialect: str, headers: Mapping[str, str]) -> str:
    """The kind of a call: "turn", or that of the side call that it is. Header names are lower-case."""
    if request.kind != TURN:
        return request.kind
    agent = headers.get("user-agent", "")
    for rule in RULES:
        if agent.startswith(rule.agent) and _matches(rule, request):
            return rule.kind
    return TURN


def _matches(rule: Rule, request: ModelRequest) -> bool:
    messages = request.messages
    if bool(request.tools) != rule.tools or not messages:
        return False
    system = messages[0] if messages[0]["role"] == "system" else {"content": ""}
    return _text(system).startswith(rule.system) and _text(messages[-1]).startswith(rule.last)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
