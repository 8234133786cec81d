import time
from typing import Any

import pytest

from polar_gateway.dialects import api_key, route

CALLS = {
    "/messages": "anthropic",
    "/responses": "responses",
    "/chat/completions": "chat",
}


@pytest.mark.parametrize("prefix", ["", "/v1", "/s/abc/v1", "/any/where"])
@pytest.mark.parametrize("path", CALLS)
def test_a_model_call_is_found_under_any_prefix(prefix: str, path: str) -> None:
    found = route("POST", prefix + path, {}, {})
    assert found is not None
    assert (found.dialect.name, found.kind, found.fields) == (CALLS[path], "call", {})


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1beta", "/s/abc/v1beta", "/models/proxy/v1beta"])
@pytest.mark.parametrize("model", ["m", "Qwen/Qwen3.5-4B", "tuned:7", "data/models/m"])
@pytest.mark.parametrize(
    ("method", "query", "fields"),
    [
        ("generateContent", {}, {"stream": False, "alt": "json"}),
        ("streamGenerateContent", {"alt": "sse"}, {"stream": True, "alt": "sse"}),
        ("streamGenerateContent", {}, {"stream": True, "alt": "json"}),
    ],
)
def test_a_google_call_says_in_its_url_what_others_say_in_the_body(
    prefix: str, model: str, method: str, query: dict[str, str], fields: dict[str, Any]
) -> None:
    found = route("POST", f"{prefix}/models/{model}:{method}", query, {})
    assert found is not None
    assert (found.dialect.name, found.kind) == ("google", "call")
    assert found.fields == {"model": model, **fields}


@pytest.mark.parametrize(
    ("path", "query", "headers", "expected"),
    [
        ("/v1beta/models", {}, {}, ("google", "models", {})),
        ("/v1alpha/models/", {}, {}, ("google", "models", {})),
        (
            "/v1beta/models/Qwen/Qwen3.5-4B",
            {},
            {},
            ("google", "model", {"model": "Qwen/Qwen3.5-4B"}),
        ),
        ("/v1/models", {"key": "k"}, {}, ("google", "models", {})),
        ("/v1/models/m", {}, {"x-goog-api-key": "k"}, ("google", "model", {"model": "m"})),
        ("/v1beta/openai/models", {}, {"x-goog-api-key": "k"}, ("chat", "models", {})),
        ("/v1/models", {}, {"authorization": "Bearer k"}, ("chat", "models", {})),
    ],
)
def test_googles_models_are_told_from_openais(
    path: str, query: dict[str, str], headers: dict[str, str], expected: tuple[str, str, Any]
) -> None:
    found = route("GET", path, query, headers)
    assert found is not None
    assert (found.dialect.name, found.kind, found.fields) == expected


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("POST", "/v1/messages/count_tokens", {}, ("anthropic", "count_tokens")),
        ("POST", "/v1/responses/input_tokens", {}, ("responses", "count_tokens")),
        ("GET", "/v1/models", {}, ("chat", "models")),
        ("GET", "/v1/models", {"anthropic-version": "2023-06-01"}, ("anthropic", "models")),
        ("HEAD", "/", {}, ("chat", "probe")),
        ("HEAD", "/", {"anthropic-version": "2023-06-01"}, ("anthropic", "probe")),
        ("GET", "/", {}, ("chat", "probe")),
        ("HEAD", "/api/hello", {}, ("anthropic", "probe")),
        ("GET", "/prefix/api/hello", {}, ("anthropic", "probe")),
        ("GET", "/v1/responses", {"upgrade": "websocket"}, ("responses", "websocket")),
        ("GET", "/v1/realtime", {"upgrade": "websocket"}, ("responses", "websocket")),
        ("GET", "/v1/responses/resp_1", {}, ("responses", "stored")),
        ("DELETE", "/v1/responses/resp_1", {}, ("responses", "stored")),
        ("GET", "/v1/responses/resp_1/input_items", {}, ("responses", "stored")),
        ("POST", "/v1/responses/resp_1/cancel", {}, ("responses", "stored")),
        ("POST", "/v1/responses/compact", {}, ("responses", "call")),
        ("POST", "/v1/chat/completions/", {}, ("chat", "call")),
        ("POST", "/v1beta/models/a/b:countTokens", {}, ("google", "count_tokens")),
    ],
)
def test_an_auxiliary_request_is_told_from_a_model_call(
    method: str, path: str, headers: dict[str, str], expected: tuple[str, str]
) -> None:
    found = route(method, path, {}, headers)
    assert found is not None
    assert (found.dialect.name, found.kind) == expected


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/messages"),
        ("DELETE", "/v1/responses"),
        ("POST", "/"),
        ("GET", "/sessions"),
    ],
)
def test_anything_else_is_no_dialects(method: str, path: str) -> None:
    assert route(method, path, {}, {}) is None


@pytest.mark.parametrize("piece", ["/v1/models/", "/tunedModels/:", "/v1beta/models", "/v1", "/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_of_any_form_is_read_in_the_time_of_its_length(method: str, piece: str) -> None:
    """Anyone may send one, with a key or without."""
    path = piece * (60_000 // len(piece)) + "\n"
    began = time.process_time()
    route(method, path, {}, {"x-goog-api-key": "k"})
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("headers", "query", "key"),
    [
        ({"authorization": "Bearer sk-1"}, {}, "sk-1"),
        ({"authorization": "bearer  sk-1 "}, {}, "sk-1"),
        ({"x-api-key": "sk-2"}, {}, "sk-2"),
        ({"x-goog-api-key": "sk-3"}, {}, "sk-3"),
        ({}, {"key": "sk-4"}, "sk-4"),
        ({"authorization": "Bearer sk-1", "x-api-key": "sk-2"}, {"key": "sk-4"}, "sk-1"),
        ({"authorization": "Bearer ", "x-api-key": "sk-2"}, {}, "sk-2"),
        ({"authorization": "Basic c2s="}, {}, None),
        ({}, {}, None),
        ({"x-api-key": ""}, {"key": ""}, None),
    ],
)
def test_the_key_is_taken_from_wherever_a_provider_puts_it(
    headers: dict[str, str], query: dict[str, str], key: str | None
) -> None:
    assert api_key(headers, query) == key
