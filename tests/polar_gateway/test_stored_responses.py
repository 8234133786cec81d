import json
from typing import Any

import msgspec
import pytest

from polar_gateway.request_body import RefusedError
from polar_gateway.stored_responses import StoredResponses


def answered(number: int, text: str = "ok", **fields: Any) -> bytes:
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": text}
    return msgspec.json.encode(
        {"id": f"resp_{number}", "object": "response", "output": [item], **fields}
    )


def said(body: dict[str, Any]) -> list[Any]:
    """The texts of a body's input."""
    texts = []
    for item in body["input"]:
        content = item["content"]
        texts.append(content if isinstance(content, str) else content[0]["text"])
    return texts


def test_a_response_goes_on_from_an_earlier_ones_input_and_output() -> None:
    stored = StoredResponses()
    first = {"input": "One?", "instructions": "Be brief."}
    assert stored.expand(first) is first
    stored.keep(first, answered(1, "One."))
    second = {"input": [{"role": "user", "content": "Two?"}], "previous_response_id": "resp_1"}
    untouched = json.loads(json.dumps(second))
    expanded = stored.expand(second)
    assert second == untouched
    assert said(expanded) == ["One?", "One.", "Two?"]
    assert "instructions" not in expanded
    assert expanded["previous_response_id"] == "resp_1"
    stored.keep(second, answered(2, "Two."))
    third = stored.expand({"input": "Three?", "previous_response_id": "resp_2"})
    assert said(third) == ["One?", "One.", "Two?", "Two.", "Three?"]
    beside = stored.expand({"input": "Again?", "previous_response_id": "resp_1"})
    assert said(beside) == ["One?", "One.", "Again?"]


def test_what_is_not_to_be_stored_is_not() -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?", "store": False}, answered(1))
    stored.keep({"input": "One?"}, answered(2, object="response.compaction"))
    for response_id in ("resp_1", "resp_2"):
        with pytest.raises(RefusedError) as refused:
            stored.expand({"input": "Two?", "previous_response_id": response_id})
        assert (refused.value.kind.status, refused.value.kind.param) == (
            400,
            "previous_response_id",
        )
        assert response_id in refused.value.kind.message


def test_an_item_is_found_by_its_id() -> None:
    stored = StoredResponses()
    stored.keep({"input": [{"id": "mine", "role": "user", "content": "One?"}]}, answered(1, "One."))
    references = [{"type": "item_reference", "id": "msg_1"}, {"id": "mine"}]
    body = {"input": [*references, {"role": "user", "content": "Two?"}]}
    assert said(stored.expand(body)) == ["One.", "One?", "Two?"]
    stored.keep(body, answered(2))
    follow = stored.expand({"input": [], "previous_response_id": "resp_2"})
    assert said(follow) == ["One.", "One?", "Two?", "ok"]
    with pytest.raises(RefusedError, match="Item with id 'gone' not found") as refused:
        stored.expand({"input": [{"type": "item_reference", "id": "gone"}]})
    assert refused.value.kind.status == 404


def test_short_references_to_much_are_refused() -> None:
    stored = StoredResponses(max_bytes=4000)
    stored.keep({"input": "One?"}, answered(1, "x" * 2000))
    once = {"type": "item_reference", "id": "msg_1"}
    assert said(stored.expand({"input": [once]})) == ["x" * 2000]
    with pytest.raises(RefusedError) as refused:
        stored.expand({"input": [once] * 1000})
    assert refused.value.kind.code == "too_large"


@pytest.mark.parametrize(
    "body",
    [
        {"input": "x", "previous_response_id": 1},
        {"input": [1], "previous_response_id": "resp_1"},
    ],
)
def test_a_body_that_makes_no_sense_is_refused(body: dict[str, Any]) -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?"}, answered(1))
    with pytest.raises(RefusedError) as refused:
        stored.expand(body)
    assert refused.value.kind.code == "invalid_request"


def test_the_oldest_are_forgotten_when_there_are_too_many() -> None:
    stored = StoredResponses(most=2)
    for number in (1, 2, 3):
        stored.keep({"input": "x"}, answered(number))
    assert [ask(stored, f"resp_{number}")[0] for number in (1, 2, 3)] == [404, 200, 200]
    with pytest.raises(RefusedError):
        stored.expand({"input": [{"id": "msg_1"}]})


def test_the_oldest_are_forgotten_when_they_are_too_large() -> None:
    stored = StoredResponses(max_bytes=4000)
    for number in (1, 2, 3):
        stored.keep({"input": "x" * 1500}, answered(number))
    assert [ask(stored, f"resp_{number}")[0] for number in (1, 2, 3)] == [404, 200, 200]
    stored.keep({"input": "x" * 5000}, answered(4))
    assert [ask(stored, f"resp_{number}")[0] for number in (2, 3, 4)] == [200, 200, 404]


def test_a_response_stored_twice_counts_once() -> None:
    stored = StoredResponses(max_bytes=4000)
    for number in (1, 2, 2, 2):
        stored.keep({"input": "x" * 1500}, answered(number))
    assert [ask(stored, f"resp_{number}")[0] for number in (1, 2)] == [200, 200]


def test_a_conversation_costs_its_length() -> None:
    stored = StoredResponses(max_bytes=60_000)
    previous = None
    for number in range(20):
        body = {"input": "x" * 1000, "previous_response_id": previous}
        stored.keep(body, answered(number, "y" * 1000))
        previous = f"resp_{number}"
    expanded = stored.expand({"input": "On.", "previous_response_id": previous})
    assert len(expanded["input"]) == 41


def test_a_chain_with_a_gap_cannot_be_continued() -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?"}, answered(1))
    stored.keep({"input": "Two?", "previous_response_id": "resp_1"}, answered(2))
    assert ask(stored, "resp_1", method="DELETE") == (
        200,
        {"id": "resp_1", "object": "response", "deleted": True},
    )
    with pytest.raises(RefusedError, match="resp_1"):
        stored.expand({"input": "Three?", "previous_response_id": "resp_2"})
    status, refusal = ask(stored, "resp_2/input_items")
    assert (status, refusal["error"]["code"]) == (400, "previous_response_not_found")


def ask(
    stored: StoredResponses, path: str, method: str = "GET", **query: str
) -> tuple[int, dict[str, Any]]:
    status, body = stored.answer(method, f"/v1/responses/{path}", query)
    return status, json.loads(body)


def test_a_stored_response_is_given_as_it_was() -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?"}, answered(1))
    assert stored.answer("GET", "/s/x/v1/responses/resp_1/", {}).body == answered(1)
    status, refusal = ask(stored, "resp_9")
    assert (status, refusal["error"]["message"]) == (404, "Response with id 'resp_9' not found.")


def test_an_answer_given_at_once_cannot_be_cancelled() -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?"}, answered(1))
    status, refusal = ask(stored, "resp_1/cancel", method="POST")
    assert (status, refusal["error"]["type"]) == (400, "invalid_request_error")
    assert ask(stored, "resp_9/cancel", method="POST")[0] == 404


def test_the_input_is_listed_page_by_page_the_newest_first() -> None:
    stored = StoredResponses()
    given = [{"role": "user", "content": str(number)} for number in range(3)]
    stored.keep({"input": given}, answered(1, "3"))
    stored.keep({"input": "4", "previous_response_id": "resp_1"}, answered(2))
    _, page = ask(stored, "resp_2/input_items")
    assert said({"input": page["data"]}) == ["4", "3", "2", "1", "0"]
    assert (page["object"], page["has_more"]) == ("list", False)
    _, page = ask(stored, "resp_2/input_items", order="asc", limit="2")
    assert said({"input": page["data"]}) == ["0", "1"]
    assert page["has_more"] is True
    assert [page["first_id"], page["last_id"]] == [item["id"] for item in page["data"]]
    _, page = ask(stored, "resp_2/input_items", order="asc", limit="3", after=page["last_id"])
    assert said({"input": page["data"]}) == ["2", "3", "4"]
    assert page["has_more"] is False
    _, page = ask(stored, "resp_2/input_items", order="asc", after=page["last_id"])
    assert (page["data"], page["first_id"]) == ([], None)


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}])
def test_a_page_that_does_not_exist_is_refused(query: dict[str, str]) -> None:
    stored = StoredResponses()
    stored.keep({"input": "One?"}, answered(1))
    assert ask(stored, "resp_1/input_items", **query)[0] == 400
