"""A model endpoint on the loopback that says one fixed thing in each provider's dialect."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPLY = "The work is done."

_RESPONSES_ITEM = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "content": [{"type": "output_text", "text": REPLY, "annotations": []}],
}
_RESPONSES_USAGE = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105}


def _sse(*events: tuple[str | None, dict[str, Any]]) -> bytes:
    lines = []
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        lines.append(f"{head}data: {json.dumps(data)}\n\n")
    return "".join(lines).encode()


def _named(*events: dict[str, Any]) -> bytes:
    return _sse(*((event["type"], event) for event in events))


STREAMS = {
    "/v1/responses": _named(
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_item.done", "output_index": 0, "item": _RESPONSES_ITEM},
        {"type": "response.completed", "response": {"id": "resp_1", "usage": _RESPONSES_USAGE}},
    ),
    "/v1/messages": _named(
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "stub-model",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 100, "output_tokens": 0},
            },
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": REPLY},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    ),
    "/v1/chat/completions": _sse(
        (
            None,
            {
                "id": "chatcmpl-1",
                "object": "chat.completion.chunk",
                "created": 0,
                "model": "stub-model",
                "choices": [
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": REPLY},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105},
            },
        )
    )
    + b"data: [DONE]\n\n",
    "streamGenerateContent": _sse(
        (
            None,
            {
                "candidates": [
                    {
                        "content": {"role": "model", "parts": [{"text": REPLY}]},
                        "finishReason": "STOP",
                        "index": 0,
                    }
                ],
                "usageMetadata": {
                    "promptTokenCount": 100,
                    "candidatesTokenCount": 5,
                    "totalTokenCount": 105,
                },
                "modelVersion": "stub-model",
                "responseId": "resp_1",
            },
        )
    ),
}
"""By path; Google's paths hold the model's name, so theirs is the method after the last colon."""

REFUSAL = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "the stub refuses this request"},
}


class Call:
    """One request that a CLI made."""

    def __init__(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        self.path, self.headers, self.body = path, headers, body


class StubModel:
    """`calls` in order of arrival; with `refuses` every call is answered with status 400."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.calls: list[Call] = []
        self.url = ""


@contextmanager
def stub_model(*, refuses: bool = False) -> Iterator[StubModel]:
    stub = StubModel(refuses=refuses)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            path = self.path.partition("?")[0]
            stub.calls.append(Call(path, headers, json.loads(body)))
            stream = STREAMS.get(path) or STREAMS.get(path.rpartition(":")[2])
            if stub.refuses or stream is None:
                self._answer(400, "application/json", json.dumps(REFUSAL).encode())
            else:
                self._answer(200, "text/event-stream", stream)

        def _answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing; the calls are kept."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
