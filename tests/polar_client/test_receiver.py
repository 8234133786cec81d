import httpx2
import msgspec
import pytest

from polar_client.receiver import CallbackReceiver
from polar_server.protocol import TaskResult


def body(task_id: str, status: str = "completed") -> bytes:
    return msgspec.json.encode(TaskResult(task_id=task_id, status=status))


async def post(receiver: CallbackReceiver, content: bytes, delivery: str | None = None) -> int:
    headers = {"webhook-id": delivery} if delivery else {}
    async with httpx2.AsyncClient() as http:
        return (await http.post(receiver.url, content=content, headers=headers)).status_code


async def test_results_come_in_order_of_arrival() -> None:
    async with CallbackReceiver() as receiver:
        assert await post(receiver, body("one"), "d1") == 200
        assert await post(receiver, body("two"), "d2") == 200
        assert [(await anext(receiver)).task_id for _ in range(2)] == ["one", "two"]


async def test_a_delivery_that_is_repeated_is_acknowledged_and_handed_on_once() -> None:
    async with CallbackReceiver() as receiver:
        for _ in range(3):
            assert await post(receiver, body("one"), "d1") == 200
        assert await post(receiver, body("two"), "d2") == 200
        assert [(await anext(receiver)).task_id for _ in range(2)] == ["one", "two"]


async def test_a_new_run_of_the_same_task_is_a_new_result() -> None:
    async with CallbackReceiver() as receiver:
        await post(receiver, body("one"), "d1")
        await post(receiver, body("one"), "d2")
        assert [(await anext(receiver)).task_id for _ in range(2)] == ["one", "one"]


async def test_senders_without_delivery_ids_are_told_apart_by_what_they_send() -> None:
    async with CallbackReceiver() as receiver:
        await post(receiver, body("one"))
        await post(receiver, body("one"))
        await post(receiver, body("one", "cancelled"))
        assert [(await anext(receiver)).status for _ in range(2)] == ["completed", "cancelled"]


async def test_what_is_no_task_result_is_refused_and_not_handed_on() -> None:
    async with CallbackReceiver() as receiver:
        assert await post(receiver, b'{"status": 1}') == 400
        assert await post(receiver, body("one"), "d1") == 200
        assert (await anext(receiver)).task_id == "one"


async def test_an_error_inside_leaves_the_receiver_as_it_was_raised() -> None:
    with pytest.raises(LookupError, match="mine"):
        async with CallbackReceiver():
            raise LookupError("mine")

