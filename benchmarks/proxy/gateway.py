"""The gateway's proxy with sessions to call.

`python -m benchmarks.proxy.gateway URL FOLDER COUNT [tokens]`: with `tokens` the engine is sent
recorded ids, else messages.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.proxy.conversation import END_OF_TURN
from benchmarks.proxy.process import serve_until_told
from builders.records import Mode
from polar_gateway.backend import Backend
from polar_gateway.backends import Backends
from polar_gateway.capture.session import SessionCapture
from polar_gateway.config import InferenceConfig
from polar_gateway.engines.base import EngineProbe
from polar_gateway.engines.vllm import Vllm
from polar_gateway.garbage import collect_rarely, give_large_blocks_back
from polar_gateway.prompts import Prompter
from polar_gateway.proxy import Proxy
from polar_gateway.sessions import Session, Sessions


def key(number: int) -> str:
    """The API key, and id, of a session."""
    return f"bench-{number:04d}"


def journal(folder: Path, number: int) -> Path:
    return folder / f"{key(number)}.journal"


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[Proxy]:
    url, folder, count = arguments[0], Path(arguments[1]), int(arguments[2])
    mode: Mode = "tokens" if "tokens" in arguments else "messages"
    sessions = Sessions()
    for number in range(count):
        capture = SessionCapture(
            session_id=key(number),
            task_id="bench",
            journal_path=journal(folder, number),
            policy_version="1",
        )
        sessions.add(
            Session(
                session_id=key(number),
                task_id="bench",
                attempt_id="",
                key=key(number),
                capture=capture,
                prompter=Prompter(InferenceConfig(prompts=mode)),
            )
        )
    collect_rarely()
    give_large_blocks_back()
    engine = Vllm(url, model="bench")
    probe = EngineProbe(
        engine=engine.name,
        model="bench",
        token_routes=["chat"],
        renders="full",
        end_of_turn_ids=[END_OF_TURN],
        end_of_turn_texts=["<|im_end|>"],
    )
    yield Proxy(sessions=sessions, backends=Backends([Backend("bench", url, engine, probe)]))
    await engine.aclose()


if __name__ == "__main__":
    serve_until_told(opened)
