import json
from typing import Any

import pytest

from polar_gateway.dialects import compaction, responses
from polar_gateway.dialects.turn import Text, UnsupportedRequestError
from tests.polar_gateway.dialects.clients import CREATED, turn
from tests.polar_gateway.dialects.responses_items import RUN, call, message, output

SUMMARY = turn([Text(text="Files were listed.")], cached_tokens=64)


def compacted(*items: Any, **fields: Any) -> dict[str, Any]:
    request = compaction.normalise({"model": "m", "input": list(items), **fields})
    answer: dict[str, Any] = json.loads(compaction.answer(request, SUMMARY))
    return answer


def test_a_summary_is_asked_for_behind_the_whole_history() -> None:
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [message("user", "List."), call("a"), output("a")],
        "tools": [RUN],
        "stream": True,
    }
    before, request = responses.normalise(body), compaction.normalise(body)
    assert request.messages[:-1] == before.messages
    assert request.messages[-1]["role"] == "user"
    assert (request.kind, request.stream, request.tools) == ("compaction", False, None)


def test_the_users_messages_stay_and_the_summary_stands_for_the_rest() -> None:
    shown = [{"type": "input_text", "text": "List."}]
    answer = compacted(
        message("developer", "Be kind."),
        message("user", shown, id="msg_theirs"),
        call("a"),
        output("a"),
        {"role": "user", "content": "And now?"},
    )
    assert (answer["object"], answer["id"]) == ("response.compaction", "resp_0123456789ab")
    assert answer["created_at"] == CREATED
    assert (answer["usage"]["input_tokens"], answer["usage"]["total_tokens"]) == (1000, 1050)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 64
    first, second, summary = answer["output"]
    assert first == {
        "id": "msg_theirs",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": shown,
    }
    assert second["content"] == [{"type": "input_text", "text": "And now?"}]
    assert (summary["type"], sorted(summary)) == (
        "compaction",
        ["encrypted_content", "id", "type"],
    )
    assert "Files were listed." not in summary["encrypted_content"]


def test_what_was_compacted_can_be_gone_on_with_and_compacted_again() -> None:
    output_items = compacted(message("user", "List."), call("a"), output("a"))["output"]
    again = [*output_items, message("user", "Go on.")]
    request = responses.normalise({"model": "m", "input": again})
    assert [each["content"] for each in request.messages] == [
        "List.",
        "Summary of the conversation so far:\n\nFiles were listed.",
        "Go on.",
    ]
    assert request.answers == {}
    assert [item["type"] for item in compacted(*again)["output"]] == [
        "message",
        "message",
        "compaction",
    ]


def test_a_string_is_a_users_message() -> None:
    request = compaction.normalise({"model": "m", "input": "Hi"})
    assert request.messages[0] == {"role": "user", "content": "Hi"}
    [kept, _] = json.loads(compaction.answer(request, SUMMARY))["output"]
    assert kept["content"] == [{"type": "input_text", "text": "Hi"}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_users_message_without_content_stays(content: dict[str, Any]) -> None:
    [kept, _] = compacted({"role": "user", **content})["output"]
    assert kept["content"] == []


def test_input_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedRequestError, match="input: must be a list of objects"):
        compaction.normalise({"model": "m", "input": [1]})
