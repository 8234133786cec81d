"""Which calls are the same call, and what late listeners hear; the proxy's tests do it over HTTP."""

import time
from pathlib import Path
from typing import Any

import pytest

from polar_gateway.capture.session import SessionCapture
from polar_gateway.dialects import chat
from polar_gateway.dialects.turn import ModelRequest, Text, Turn, Usage
from polar_gateway.exchange import Exchange
from polar_gateway.generations import (
    MAX_UNCLAIMED,
    Asked,
    Generation,
    Generations,
    is_marked,
    same_call,
)

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}


def call(dialect: str = "chat", headers: dict[str, str] | None = None, **fields: Any) -> Asked:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "max_tokens": 100,
        "sampling": {"temperature": 0.5},
    }
    return Asked(dialect, headers or {}, ModelRequest(**{**request, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"include_usage": False},
        {"max_tokens": 5},
        {"notes": ["x ignored"]},
        {"headers": {"user-agent": "another"}},
    ],
)
def test_how_an_answer_is_brought_makes_no_other_call(fields: dict[str, Any]) -> None:
    assert same_call(call(), call(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"dialect": "responses"},
        {"headers": {"thread-id": "t2"}},
        {"headers": {"x-claude-code-agent-id": "a"}},
        {"headers": {"x-session-id": "s"}},
        {"model": "n"},
        {"messages": [{"role": "user", "content": "ho"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]},
        {"tools": None},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"sampling": {"temperature": 0.6}},
        {"response_format": {"type": "json_object"}},
        {"template_kwargs": {"enable_thinking": False}},
        {"kind": "compaction"},
        {"answers": {0: "msg_000000000001"}},
    ],
)
def test_what_changes_the_prompt_or_the_distribution_makes_another_call(
    fields: dict[str, Any],
) -> None:
    assert not same_call(call(), call(**fields))


def test_a_higher_limit_asks_anew_for_what_the_limit_has_cut() -> None:
    assert not same_call(call(), call(max_tokens=64_000), cut=True)
    assert same_call(call(), call(), cut=True)


@pytest.mark.parametrize(
    ("count", "marked"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_the_sdks_say_when_they_ask_again(count: str | None, marked: bool) -> None:
    assert is_marked({} if count is None else {"x-stainless-retry-count": count}) is marked


@pytest.mark.parametrize("joined", [False, True])
async def test_what_was_told_at_once_and_not_concluded_was_told_of_all_tokens(
    tmp_path: Path, joined: bool
) -> None:
    """Else a harness that keeps the whole text would go on from the beginning of its tokens."""
    capture = SessionCapture(session_id="s", journal_path=tmp_path / "journal")
    asked = call(stream=True)
    record = capture.open(asked.request, completion_id="msg_1", dialect="chat", headers={})
    generation = Generation(asked, record)

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        leaver.gone = leaver.gone or b"stop" in message.get("body", b"")

    leaver, gone = Exchange(receive, send), Exchange(receive, send)
    gone.gone = True
    turn = Turn(
        completion_id="msg_1",
        created=0,
        blocks=[Text(text="It is said.")],
        finish_reason="stop",
        usage=Usage(completion_tokens=7),
    )
    listener = generation.listener(leaver, chat, asked.request)
    first = generation.listener(gone, chat, asked.request) if joined else listener
    generation.turn = turn
    await generation.conclude(turn, first)
    if joined:
        assert record.delivered_tokens == 0
        await generation.follow(listener)
    assert not generation.delivered
    assert record.delivered_tokens == 7
    capture.close()


async def test_many_large_calls_are_told_apart_in_no_time(tmp_path: Path) -> None:
    capture = SessionCapture(session_id="s", journal_path=tmp_path / "journal")
    record = capture.open(call().request, completion_id="msg_1", dialect="chat", headers={})

    def large(index: int) -> Asked:
        parts = [{"type": "text", "text": str(part)} for part in (*range(20_000), index)]
        first = {"role": "user", "content": parts}
        return call(messages=[first, {"role": "user", "content": "hi"}])

    answers = Generations()
    for index in range(MAX_UNCLAIMED):
        generation = Generation(large(index), record)
        with answers.living(generation):
            generation.turn = Turn(
                completion_id="msg_1", created=0, blocks=[], finish_reason="stop", usage=Usage()
            )
    assert answers.twin(large(-1)) is None, "each one is read once"
    for index, found in ((0, True), (-1, False)):
        asked = large(index)
        began = time.monotonic()
        assert (answers.twin(asked) is not None) is found
        assert time.monotonic() - began < 0.1
    capture.close()
