import json

import msgspec
import pytest

from polar_gateway.engines.refusals import (
    Room,
    error_of,
    is_uncounted,
    overflow,
    room_of,
    unreadable,
)

UNTRUE = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
PROMPT_ALONE = (
    "This model's maximum context length is 131072 tokens. However, your prompt contains at least "
    "131073 input tokens, which exceeds this limit even without any output tokens."
)
TOO_MUCH_OUTPUT = {
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (3000 "
    "in the messages, 2000 in the completion).": Room(4096, 3000),
    "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context "
    "length is 8192 tokens and your request has 700 input tokens (9000 > 8192 - 700).": Room(
        8192, 700
    ),
    "This model's maximum context length is 16384 tokens. However, you requested 8192 output tokens "
    "and your prompt contains at least 8193 input tokens, for a total of at least 16385 "
    "tokens.": Room(16384, None),
    "max_tokens=9000 cannot be greater than max_model_len=8192. Please request fewer output "
    "tokens.": Room(8192, None),
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested "
    "a total of 5000 tokens: 3000 tokens from the input messages and 2000 tokens for the "
    "completion.": Room(4096, 3000),
}


def refusal(said: str) -> bytes:
    return json.dumps({"error": {"message": said, "code": 400}}).encode()


@pytest.mark.parametrize(("said", "room"), TOO_MUCH_OUTPUT.items())
def test_a_refusal_of_too_much_output_tells_how_much_room_there_is(said: str, room: Room) -> None:
    assert room_of(said) == room
    assert room_of(error_of(400, refusal(said)).kind.message) == room


@pytest.mark.parametrize(
    "said",
    [
        PROMPT_ALONE,
        UNTRUE,
        (
            "The decoder prompt (length 9000) plus the number of requested output tokens (at least 1) "
            "is longer than the maximum model length of 9000."
        ),
    ],
)
def test_less_output_would_not_help_where_the_prompt_or_a_field_is_at_fault(said: str) -> None:
    assert room_of(said) is None


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (PROMPT_ALONE, "131073 tokens > 131072 maximum"),
        (
            (
                "This model's maximum context length is 4096 tokens. However, you requested 5000 "
                "tokens."
            ),
            "5000 tokens > 4096 maximum",
        ),
        (
            "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
            "9000 tokens > 8192 maximum",
        ),
        (
            "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
            "9000 tokens > 8192 maximum",
        ),
        (
            "Input length (9000 tokens) exceeds the maximum allowed length (8191 tokens).",
            "9000 tokens > 8191 maximum",
        ),
        (
            (
                "This model's maximum context length is 100 tokens. However, your prompt contains 90000 "
                "characters (more than 800 characters, which is the upper bound for 100 input tokens)."
            ),
            "101 tokens > 100 maximum",
        ),
    ],
)
def test_every_wording_of_overflow_gets_its_numbers_in_front(said: str, numbers: str) -> None:
    kind = error_of(400, refusal(said)).kind
    assert (kind.status, kind.code) == (400, "context_overflow")
    assert kind.message == f"prompt is too long: {numbers}. {said}"


def test_the_true_length_replaces_the_one_at_which_the_engine_stopped_counting() -> None:
    said = error_of(400, refusal(PROMPT_ALONE))
    assert is_uncounted(said)
    counted = overflow(said, 200_000)
    assert counted.kind.message == (
        f"prompt is too long: 200000 tokens > 131072 maximum. {PROMPT_ALONE}"
    )
    assert (counted.kind.code, counted.detail) == ("context_overflow", said.detail)


def test_a_count_that_would_fit_is_not_believed() -> None:
    said = error_of(400, refusal(PROMPT_ALONE))
    assert overflow(said, 131_000).kind.message == said.kind.message


def test_a_prompt_without_room_for_the_output_that_was_asked_for_overflows_too() -> None:
    refused = error_of(400, refusal("max_tokens=9000 cannot be greater than max_model_len=8192."))
    assert refused.kind.code == "invalid_request"
    assert overflow(refused, 8500).kind.message.startswith(
        "prompt is too long: 8500 tokens > 8192 maximum. max_tokens=9000"
    )


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [(429, "7", 7), (503, "30", 30), (429, "Wed, 21 Oct 2026 07:28:00 GMT", None), (503, "", None)],
)
def test_a_busy_engine_may_say_when_to_come_back(
    status: int, header: str, seconds: int | None
) -> None:
    error = error_of(status, b'{"error":{"message":"10.0.0.7 is full"}}', header)
    assert (error.kind.status, error.kind.code, error.kind.retry_after) == (
        503,
        "overloaded",
        seconds,
    )
    assert error.again
    assert error.kind.message == "the engine is busy", "its hosts are the operator's business"
    assert str(error) == "the engine is busy: 10.0.0.7 is full"


@pytest.mark.parametrize(
    ("status", "again"), [(500, True), (502, True), (504, True), (401, False), (404, False)]
)
def test_what_is_not_the_requests_fault_is_the_engines(status: int, again: bool) -> None:
    error = error_of(status, b"<html>upstream 10.0.0.7</html>")
    assert (error.kind.status, error.kind.code) == (500, "internal")
    assert (error.infra, error.again) == (True, again)
    assert error.kind.message == "the engine failed"


@pytest.mark.parametrize(
    ("data", "said"),
    [(b'"plain"', "plain"), (b'{"detail":"x"}', "{'detail': 'x'}"), (b"", "nothing")],
)
def test_an_error_may_have_any_form(data: bytes, said: str) -> None:
    assert str(error_of(401, data)) == f"the engine answered 401: {said}"


def test_what_cannot_be_read_is_for_the_operator() -> None:
    error = unreadable(msgspec.DecodeError("bad"), b"<html>")
    assert (error.kind.message, error.detail) == ("the engine's answer cannot be read", "<html>")
