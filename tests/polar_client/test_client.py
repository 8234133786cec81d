"""The client against the real server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from polar_client.client import RolloutClient, RolloutError, find_token, session_results
from polar_gateway.protocol import SessionResult, Verdict
from polar_server.app import ServerAddress, serve
from polar_server.config import RolloutConfig
from polar_server.protocol import TaskRequest

TASK = {
    "task_id": "t-1",
    "instruction": "Say hello.",
    "num_samples": 2,
    "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerAddress]:
    started: list[ServerAddress] = []
    listening = anyio.Event()

    def start(address: ServerAddress) -> None:
        started.append(address)
        listening.set()

    async def run() -> None:
        await serve(RolloutConfig(port=0, data_dir=tmp_path / "server"), started=start)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await listening.wait()
        yield started[0]
        group.cancel_scope.cancel()


@pytest.fixture
async def client(server: ServerAddress) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(server.url, token_file=server.token_file) as opened:
        yield opened


async def test_a_task_is_submitted_as_a_document_or_as_a_struct(client: RolloutClient) -> None:
    submitted = await client.submit(TASK)
    assert (submitted.task_id, submitted.status) == ("t-1", "running")
    again = await client.submit(msgspec.convert({**TASK, "task_id": "t-2"}, TaskRequest))
    assert again.task_id == "t-2"
    assert (await client.rollout_status()).tasks == {"t-1": "running", "t-2": "running"}


async def test_a_wrong_document_is_an_error_with_the_fields_path(client: RolloutClient) -> None:
    wrong = {**TASK, "runtime": {"backend": "docker", "prepare": [{"type": "exec", "comand": "x"}]}}
    with pytest.raises(RolloutError, match="comand") as refused:
        await client.submit(wrong)
    assert refused.value.field == "runtime.prepare[0].comand"
    assert refused.value.status == 422
    assert not refused.value.unreachable


async def test_a_status_without_results_shows_the_sessions_alone(client: RolloutClient) -> None:
    await client.submit(TASK)
    status = await client.status("t-1", include=())
    assert [session.status for session in status.sessions] == ["REGISTERED", "REGISTERED"]
    assert status.results == []


async def test_a_task_that_is_not_known_is_a_404(client: RolloutClient) -> None:
    with pytest.raises(RolloutError, match="nothing-here") as refused:
        await client.status("nothing-here")
    assert refused.value.status == 404


async def test_a_cancelled_task_ends_the_wait_for_it(client: RolloutClient) -> None:
    await client.submit(TASK)
    await client.cancel("t-1")
    with anyio.fail_after(20):
        status = await client.wait("t-1")
    assert status.status == "cancelled"
    ended = session_results(status.results)
    assert [result.status for result in ended] == ["ERROR", "ERROR"]


async def test_watching_yields_changes_and_ends_with_the_task(client: RolloutClient) -> None:
    await client.submit(TASK)
    seen: list[str] = []
    with anyio.fail_after(20):
        async for status in client.watch("t-1"):
            if not seen:
                await client.cancel("t-1")
            seen.append(status.status)
            assert status.results == []
    assert seen[0] == "running"
    assert seen[-1] == "cancelled"


async def test_nodes_are_listed(client: RolloutClient) -> None:
    assert await client.nodes() == []


async def test_a_wrong_token_is_refused(server: ServerAddress) -> None:
    async with RolloutClient(server.url, token="wrong") as client:
        with pytest.raises(RolloutError) as refused:
            await client.nodes()
    assert refused.value.status == 401


async def test_an_address_where_nobody_listens_is_unreachable() -> None:
    async with RolloutClient("http://127.0.0.1:9") as client:
        with pytest.raises(RolloutError, match="cannot reach") as failed:
            await client.nodes()
    assert failed.value.unreachable


async def test_watching_outlives_a_server_that_is_away_for_less_than_its_patience() -> None:
    async with RolloutClient("http://127.0.0.1:9") as client:
        began = anyio.current_time()
        with pytest.raises(RolloutError):
            async for _ in client.watch("t-1", patience=1.0):
                pass
        assert anyio.current_time() - began > 1.0


def test_the_token_comes_from_the_argument_then_the_variable_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, other = tmp_path / "named", tmp_path / "other"
    named.write_text("of-the-argument\n")
    other.write_text("of-the-file\n")
    monkeypatch.delenv("POLAR_TOKEN", raising=False)
    monkeypatch.setenv("POLAR_TOKEN_FILE", str(other))
    assert find_token() == "of-the-file"
    monkeypatch.setenv("POLAR_TOKEN", "of-the-variable")
    assert find_token() == "of-the-variable"
    assert find_token(named) == "of-the-argument"


def test_a_token_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"none: No such file"):
        find_token(tmp_path / "none")


def test_results_are_decoded_when_they_are_wanted() -> None:
    result: Any = SessionResult(
        session_id="s", task_id="t", status="COMPLETED", verdict=Verdict(reward="graded", tokens="all")
    )
    assert session_results([msgspec.Raw(msgspec.json.encode(result))]) == [result]


async def test_a_proxy_of_the_environment_is_not_asked_for_the_loopback(
    server: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with RolloutClient(server.url, token_file=server.token_file) as client:
        assert await client.nodes() == []
