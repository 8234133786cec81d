"""Every echo in the recorded traffic of the harnesses is restored.

The recorded answers become completions of ours, with their arguments spelled as no harness spells
them, so that an echo that is let through would be seen. The recorded requests then come as they came
to the recorder, except that the opaque values which the recorder signed its answers with are ours.
"""

import base64
import json
import re
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from builders.records import Completion
from polar_gateway.capture.session import SessionCapture
from polar_gateway.dialects import Route, google
from polar_gateway.dialects.turn import Block, ModelRequest, Text, Usage
from polar_gateway.engines.base import EngineReply
from tests.polar_gateway.capture.blocks import blocks_of, closed
from tests.polar_gateway.dialects.clients import receive_stream
from tests.recordings import Exchange, load, recordings, routed

HISTORY = {"anthropic": "messages", "chat": "messages", "google": "contents", "responses": "input"}
SIGNED = re.compile(r'"(?:thoughtSignature|signature)": ?"([^"]+)"')


HALF = "Half of this text is lost in mid stream"
"""What the recorder said before it cut a stream off."""


class Echo(NamedTuple):
    where: str
    sent: dict[str, Any]
    restored: bool
    notes: list[str]


def echoes(folder: Path, harness: str, scenario: str, loss: str) -> list[Echo]:
    """Every echo of a recording, as it fares when the recording is played."""
    capture = SessionCapture(session_id="s1", journal_path=folder / f"{harness}-{scenario}")
    answers: list[Completion] = []
    signatures: dict[str, str] = {}
    found: list[Echo] = []
    for exchange in load(harness, scenario):
        asked, body = received(exchange, signatures)
        request = asked.dialect.normalise(body)
        if loss == "reasoning":
            for message in request.messages:
                message.pop("reasoning_content", None)
        if loss == "references":
            request = msgspec.structs.replace(request, answers={})
        restored = capture.restored(request)
        for index, message in enumerate(restored.messages):
            if message["role"] == "assistant":
                same = any(message == answer.response_message for answer in answers)
                found.append(
                    Echo(
                        f"{exchange.id}/{index}",
                        request.messages[index],
                        same,
                        [each for each in restored.notes if each not in request.notes],
                    )
                )
        completion_id = f"msg_{exchange.number:012x}"
        call = capture.open(
            restored, completion_id=completion_id, dialect=asked.dialect.name, headers={}
        )
        sse = exchange.response.get("sse")
        if sse is None:
            call.fail("the recorder refused this call")
            continue
        if exchange.cut:
            call.close(reply([Text(text=f"{HALF}, and this is the rest.")]), {})
            call.delivered_tokens = 3
            call.undelivered()
            continue
        encoded = base64.b64encode(completion_id.encode()).decode()
        ours = encoded if asked.dialect is google else completion_id
        signatures |= dict.fromkeys(SIGNED.findall(sse), ours)
        answers.append(closed(capture, call, reply(answered(asked, body, sse))))
    return found


def received(exchange: Exchange, signatures: dict[str, str]) -> tuple[Route, dict[str, Any]]:
    found = routed(exchange)
    text = json.dumps(exchange.request["body"])
    for theirs, ours in signatures.items():
        text = text.replace(theirs, ours)
    return found, {**json.loads(text), **found.fields}


def answered(asked: Route, body: dict[str, Any], sse: str) -> list[Block]:
    """The recorded answer, read as a history that holds all of it."""
    field = HISTORY[asked.dialect.name]
    history = receive_stream(asked.dialect, sse).history
    opening = {"role": "user", "content": "go", "parts": [{"text": "go"}]}
    whole = {**body, field: [opening, *history, opening]}
    request: ModelRequest = asked.dialect.normalise(whole)
    [message] = [each for each in request.messages if each["role"] == "assistant"]
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = respelled(call["function"]["arguments"])
    return blocks_of(message)


def reply(blocks: list[Block]) -> EngineReply:
    return EngineReply(
        prompt_ids=array("i", [1]),
        sampled_ids=array("i", [2]),
        logprobs=array("f", [-0.5]),
        blocks=blocks,
        finish_reason="stop",
        usage=Usage(),
    )


def respelled(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


LEAST = {
    "claude_code": 15,
    "codex": 20,
    "gemini_cli": 13,
    "opencode": 21,
    "pi": 19,
    "pi_old": 10,
    "qwen_code": 25,
}
"""How many echoes there are of each harness, at least."""


@pytest.mark.parametrize("loss", ["nothing", "reasoning", "references"])
@pytest.mark.parametrize("harness", list(LEAST))
def test_every_recorded_echo_is_restored(tmp_path: Path, harness: str, loss: str) -> None:
    found = [
        echo
        for name, scenario in recordings()
        if name == harness
        for echo in echoes(tmp_path, harness, scenario, loss)
    ]
    kept = [echo for echo in found if not echo.restored and echo.sent["content"] != HALF]
    assert not kept, f"{harness}: {len(found) - len(kept)} of {len(found)} echoes restored"
    assert len(found) >= LEAST[harness]
    assert not any("ambiguous echo" in echo.notes for echo in found)


def test_gemini_clis_thoughts_come_back_though_it_never_sends_them(tmp_path: Path) -> None:
    found = echoes(tmp_path, "gemini_cli", "rec_thinking", "nothing")
    assert len(found) == 3
    assert not any("reasoning_content" in echo.sent for echo in found)
    assert all("reasoning restored" in echo.notes for echo in found)


def test_what_qwen_code_keeps_of_an_answer_that_broke_off_stays_its_words(tmp_path: Path) -> None:
    found = echoes(tmp_path, "qwen_code", "drop_mid", "nothing")
    assert [echo.sent["content"] for echo in found if not echo.restored] == [HALF]
