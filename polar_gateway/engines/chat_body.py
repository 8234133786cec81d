"""A model call as a chat-completions request. Pure."""

from typing import Any

from polar_gateway.dialects.turn import ModelRequest


def chat_body(request: ModelRequest, model: str, *, stream: bool) -> dict[str, Any]:
    """The request in the form that all engines share; only what the harness or the task set is
    set. What asks for token ids differs, and is up to the engine."""
    body: dict[str, Any] = {
        **request.sampling,
        "model": model,
        "messages": request.messages,
        "stream": stream,
        "logprobs": True,
        "top_logprobs": 0,
    }
    if request.tools:  # an empty list is refused, and a choice without tools too
        body["tools"] = request.tools
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body
