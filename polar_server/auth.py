"""Who may call: everyone the health routes, everything else only with the server's token."""

import hmac
import os
import re
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from polar_server.problems import problem_response
from polar_server.protocol import Problem

OPEN = re.compile(r"(GET|HEAD) /(health|healthz)")
SUBMIT_AND_POLL = re.compile(r"POST /rollout/task/submit|(GET|HEAD) /rollout/task/[^/]+")


class TokenFileError(Exception):
    """The token file cannot be used; the message names it."""


def load_or_make_token(path: Path) -> str:
    """The bearer token in `path`; a new random one, mode 0600, when there is no such file.

    Raises TokenFileError for a file that is empty, unreadable or open to others.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise TokenFileError(f"cannot make the token file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        token = secrets.token_urlsafe(32)
        file.write(token + "\n")
    return token


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except OSError as error:
        raise TokenFileError(f"cannot read the token file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise TokenFileError(f"the token file {path} is open to other users; chmod 600 it")
    if not token:
        raise TokenFileError(f"the token file {path} is empty")
    return token


class TokenGate:
    """Refuses what comes without the token before anything is looked up, unknown paths included."""

    def __init__(self, app: ASGIApp, *, token: str, open_submit: bool) -> None:
        self._app = app
        self._token = token.encode()
        self._open = (OPEN, SUBMIT_AND_POLL) if open_submit else (OPEN,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            refusal = problem_response(
                Problem(
                    title="Unauthorized",
                    status=401,
                    detail="this route needs the server's token: Authorization: Bearer ...",
                ),
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        call = f"{scope['method']} {scope['path']}"
        if any(pattern.fullmatch(call) for pattern in self._open):
            return True
        headers = Headers(scope=scope)
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        given = credentials.strip() if scheme.lower() == "bearer" else ""
        given = given or headers.get("x-polar-control-token", "")
        return hmac.compare_digest(given.encode("latin-1"), self._token)
