"""Requests to an engine's HTTP API: one connection pool, errors as the refusals that they mean."""

import re
from typing import Any, TypeVar

import aiohttp
import msgspec

from polar_gateway.engines.refusals import error_of, unreachable, unreadable

_T = TypeVar("_T")

_NOT_JSON = re.compile(rb'("logprob":\s*)(NaN|-?Infinity)\b')


class HttpClient:
    """One engine's server. Every method raises EngineError for all that is not an answer."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._client: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, decoder: "msgspec.json.Decoder[_T]") -> _T:
        response = await self._request("GET", path, None, self._headers)
        return decoded(decoder, await self._whole(response))

    async def has(self, path: str) -> bool:
        """Whether there is an endpoint that things can be posted to."""
        try:
            async with self._session().get(self.base_url + path, headers=self._headers) as response:
                return response.status == 405
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error

    async def post(
        self, path: str, body: bytes, decoder: "msgspec.json.Decoder[_T]", request_id: str = ""
    ) -> _T:
        return decoded(decoder, await self.post_raw(path, body, request_id))

    async def post_raw(self, path: str, body: bytes, request_id: str = "") -> bytes:
        return await self._whole(await self.open(path, body, request_id))

    async def open(self, path: str, body: bytes, request_id: str = "") -> aiohttp.ClientResponse:
        """Send a request and return its answer, status 200, body unread."""
        headers = {**self._headers, "x-request-id": request_id} if request_id else self._headers
        return await self._request("POST", path, body, headers)

    async def _request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        url = self.base_url + path
        try:
            try:
                response = await self._session().request(method, url, data=body, headers=headers)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # Mostly a connection that was kept alive and that the engine has closed meanwhile:
                # a new one is no second sample, as nothing of an answer has come.
                response = await self._session().request(method, url, data=body, headers=headers)
            if response.status == 200:
                return response
            async with response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        raise error_of(response.status, data, response.headers.get("retry-after", ""))

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error
        finally:
            response.release()

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise unreachable(RuntimeError("it was removed"))
        if self._client is None:
            self._client = aiohttp.ClientSession(
                # As many calls as there are sessions: what limits them is the engine's queue.
                connector=aiohttp.TCPConnector(limit=0),
                # A generation takes as long as it takes; the session's deadline bounds it.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("accept-encoding", "user-agent"),
                read_bufsize=1 << 20,
            )
        return self._client

    async def aclose(self) -> None:
        """For good: who is still about to ask is told that nobody is there."""
        self._closed = True
        if self._client is not None:
            await self._client.close()
            self._client = None


def decoded(decoder: "msgspec.json.Decoder[_T]", data: bytes) -> _T:
    """Raises EngineError when it cannot be read. Log probabilities that JSON has no word for, which
    some servers write all the same, are decoded as the text that was written; see `as_logprob`."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        mended = _NOT_JSON.sub(_as_text, data)
        if mended == data:
            raise unreadable(error, data) from error
    try:
        return decoder.decode(mended)
    except msgspec.DecodeError as error:
        raise unreadable(error, data) from error


def _as_text(found: "re.Match[bytes]") -> bytes:
    return found[1] + b'"' + found[2] + b'"'


def as_logprob(value: Any) -> float | None:
    """A log probability as `decoded` leaves it: a number, the name of one, or null."""
    return value if value is None or isinstance(value, float) else float(value)
