import re
import stat
from pathlib import Path

import httpx2
import pytest
from starlette.routing import Route

from polar_server.api import ROUTES
from polar_server.app import serve
from polar_server.auth import TokenFileError, load_or_make_token
from polar_server.config import ConfigError
from tests.polar_server.world import config, polar

OPEN = {"/health", "/healthz"}


def calls() -> list[tuple[str, str]]:
    return [
        (method, re.sub(r"\{.*?\}", "some-id", route.path))
        for route in ROUTES
        if isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def test_a_token_is_made_once_for_this_user_alone(tmp_path: Path):
    path = tmp_path / "state" / "token"
    token = load_or_make_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_make_token(path) == token


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    with pytest.raises(TokenFileError, match="is open to other users"):
        load_or_make_token(path)


def test_an_empty_token_opens_nothing(tmp_path: Path):
    path = tmp_path / "token"
    path.touch(0o600)
    with pytest.raises(TokenFileError, match="is empty"):
        load_or_make_token(path)


def test_a_token_file_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "token").mkdir(0o700)
    with pytest.raises(TokenFileError, match=f"cannot read the token file {tmp_path / 'token'}"):
        load_or_make_token(tmp_path / "token")
    (tmp_path / "file").touch()
    with pytest.raises(TokenFileError, match="Not a directory"):
        load_or_make_token(tmp_path / "file" / "token")


async def test_every_route_but_health_needs_the_token(tmp_path: Path):
    async with polar(tmp_path) as server, httpx2.AsyncClient(base_url=server.url) as stranger:
        for method, path in [*calls(), ("GET", "/no/such/route"), ("POST", "/health")]:
            open_route = path in OPEN and method == "GET"
            answer = await stranger.request(method, path)
            assert (answer.status_code == 401) != open_route, (method, path)
            if not open_route:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await server.http.request(method, path)
            assert answer.status_code != 401, (method, path)


async def test_a_token_comes_as_bearer_or_in_the_old_header(tmp_path: Path):
    async with polar(tmp_path) as server, httpx2.AsyncClient(base_url=server.url) as stranger:
        for name, value, welcome in (
            ("authorization", f"Bearer {server.token}", True),
            ("authorization", f"bearer {server.token}", True),
            ("x-polar-control-token", server.token, True),
            ("authorization", "Bearer wrong", False),
            ("authorization", "Bearer \xff", False),
            ("authorization", f"Basic {server.token}", False),
            ("authorization", server.token, False),
            ("x-polar-control-token", "wrong", False),
        ):
            answer = await stranger.get("/nodes", headers={name: value.encode("latin-1")})
            assert (answer.status_code == 200) == welcome, (name, value)


async def test_open_submit_opens_submit_and_poll_and_nothing_else(tmp_path: Path):
    opened = {("POST", "/rollout/task/submit"), ("GET", "/rollout/task/some-id")}
    async with (
        polar(tmp_path, open_submit=True) as server,
        httpx2.AsyncClient(base_url=server.url) as stranger,
    ):
        for method, path in calls():
            answer = await stranger.request(method, path)
            assert (answer.status_code != 401) == (path in OPEN or (method, path) in opened), path


async def test_submit_is_not_opened_to_the_network(tmp_path: Path):
    with pytest.raises(ConfigError, match="loopback"):
        await serve(config(tmp_path, host="0.0.0.0", open_submit=True))
