from typing import Any

import pytest

from polar_gateway.engines.base import EngineError
from polar_gateway.engines.vllm_api import VllmApi, outline
from polar_gateway.testing.serve import serve
from tests.polar_gateway.engines.servers import Answers


def called(number: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": "text", "tool_calls": [call] * number}


def test_of_messages_that_are_sent_as_ids_only_the_number_of_calls_is_left() -> None:
    conversation = [{"role": "user", "content": "word " * 10_000}]
    assert outline(conversation) == [{"role": "user", "content": ""}]
    outlined = outline([*conversation, called(2), {"role": "tool", "content": "x"}, called(1)])
    assert [message["role"] for message in outlined] == ["user", "assistant"]
    assert len(outlined[1]["tool_calls"]) == 3
    assert "text" not in str(outlined)


def test_media_stay_so_that_ids_are_not_taken_in_their_place() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    pictured = [{"role": "user", "content": parts}]
    assert outline(pictured) is pictured
    assert outline([{"role": "user", "content": parts[:1]}]) == [{"role": "user", "content": ""}]


async def test_an_order_that_was_not_carried_out_is_an_error() -> None:
    for said, done in (({"success": False}, False), ({"status": "paused"}, True), (b"", True)):
        async with serve(Answers((200, said))) as url:
            api = VllmApi(url, None, "tiny")
            try:
                await api.order("/reset_prefix_cache")
                refused = ""
            except EngineError as error:
                refused = str(error)
            await api.http.aclose()
        assert refused == ("" if done else "the engine did not /reset_prefix_cache")


async def test_only_what_can_be_posted_to_is_there() -> None:
    for status, there in ((405, True), (404, False), (200, False)):
        async with serve(Answers((status, {}))) as url:
            api = VllmApi(url, None, "tiny")
            assert await api.http.has("/pause") == there
            await api.http.aclose()


async def test_a_rendering_without_ids_is_none() -> None:
    async with serve(Answers((200, {"prompt": "x"}))) as url:
        api = VllmApi(url, None, "tiny")
        try:
            await api.rendered({})
        except EngineError as error:
            raised = error
        await api.http.aclose()
    assert str(raised) == "the engine rendered no ids"
    assert not raised.again


async def test_the_ids_of_a_rendering_are_its_own_field_wherever_that_stands() -> None:
    answers = (
        b'{"request_id":"r","token_ids":[1,2,3],"features":null}',
        b'{"request_id":"a \\"token_ids\\":[7]","token_ids":[1,2,3]}',
        b'{"features":{"token_ids":[7]},"token_ids":[1,2,3]}',
        b'{"request_id":"{","token_ids":[1,2,3]}',
        b'{"features":[{"token_ids":[7]}],"bad_words_token_ids":[8], "token_ids" : [1,2,3]}',
    )
    for answer in answers:
        async with serve(Answers((200, answer))) as url:
            api = VllmApi(url, None, "tiny")
            assert await api.rendered_ids({}) == b"[1,2,3]"
            await api.http.aclose()


async def test_a_rendering_that_breaks_off_cannot_be_read() -> None:
    async with serve(Answers((200, b'{"token_ids":[1,2'))) as url:
        api = VllmApi(url, None, "tiny")
        with pytest.raises(EngineError, match="cannot be read"):
            await api.rendered_ids({})
        await api.http.aclose()
