"""Google's generateContent and streamGenerateContent (the Gemini API).

Fields may be spelled in camel case or in snake case, as in that API. The model and whether the answer
is streamed are in the URL.
"""

import itertools
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from polar_gateway.dialects import messages as shared
from polar_gateway.dialects.google_answers import (
    answer,
    completion_of,
    count_body,
    error_body,
    error_status,
    model_body,
    models_body,
    streamer,
)
from polar_gateway.dialects.messages import Conversation, Treatment, mapping, note, objects, string
from polar_gateway.dialects.turn import Match, ModelRequest, UnsupportedRequestError

__all__ = [
    "answer",
    "count_body",
    "error_body",
    "error_status",
    "match",
    "model_body",
    "models_body",
    "name",
    "normalise",
    "request_id_header",
    "streamer",
]

name = "google"
request_id_header = "x-request-id"

_GENERATION: dict[str, Treatment] = {
    "temperature": "translated",
    "topP": "translated",
    "topK": "translated",
    "maxOutputTokens": "translated",
    "stopSequences": "translated",
    "seed": "translated",
    "presencePenalty": "translated",
    "frequencyPenalty": "translated",
    "responseMimeType": "translated",
    "responseSchema": "translated",
    "responseJsonSchema": "translated",
    "thinkingConfig": "translated",
    "candidateCount": "answered",
    "responseModalities": "answered",
    "enableEnhancedCivicAnswers": "ignored",
    "responseLogprobs": "noted",
    "logprobs": "noted",
    "mediaResolution": "noted",
}
_GENERATION_REFUSED = {
    "speechConfig": "the model behind this endpoint does not speak",
    "imageConfig": "the model behind this endpoint does not draw",
}

FIELDS: dict[str, Treatment] = {
    "model": "translated",
    "contents": "translated",
    "systemInstruction": "translated",
    "tools": "translated",
    "toolConfig": "translated",
    "generationConfig": "translated",
    "generateContentRequest": "translated",
    "stream": "answered",
    "alt": "answered",
    "safetySettings": "ignored",
    "labels": "ignored",
    "store": "ignored",
    "serviceTier": "ignored",
    **{f"generationConfig.{field}": treatment for field, treatment in _GENERATION.items()},
}

REFUSED = {
    "cachedContent": "no content is cached here; send it in the request",
    **{f"generationConfig.{field}": reason for field, reason in _GENERATION_REFUSED.items()},
}

_SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}

_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
_VERSIONED = re.compile(r"/v1(?:alpha|beta)?\d*/(?:models|tunedModels)/")
_UNVERSIONED = re.compile(r"/(?:models|tunedModels)/")
_OWN_MODELS = re.compile(r"/v1(?:alpha|beta)\d*/models(?:/(?P<model>.+))?\Z", re.DOTALL)
_MODELS = re.compile(r"/models(?:/(?P<model>.+))?\Z", re.DOTALL)
"""The paths of OpenAI's API, apart from the version."""


def match(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Match | None:
    if method == "POST":
        return _match_call(path, query)
    if method != "GET":
        return None
    path = path.rstrip("/")
    found = _OWN_MODELS.search(path)
    if found is None and ("x-goog-api-key" in headers or "key" in query):
        found = _MODELS.search(path)
        if found is not None and path[: found.start()].endswith("/openai"):
            return None
    if found is None:
        return None
    return Match("model", {"model": found["model"]}) if found["model"] else Match("models")


def _match_call(path: str, query: Mapping[str, str]) -> Match | None:
    """A model's name may hold anything, slashes and colons too."""
    resource, _, called = path.rpartition(":")
    if called not in _METHODS:
        return None
    found = _VERSIONED.search(resource) or _UNVERSIONED.search(resource)
    if found is None or found.end() == len(resource):
        return None
    fields: dict[str, Any] = {"model": resource[found.end() :]}
    if called == "countTokens":
        return Match("count_tokens", fields)
    fields["stream"] = called == "streamGenerateContent"
    fields["alt"] = query.get("alt", "json")
    return Match("call", fields)


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def _fields(value: Any, field: str) -> dict[str, Any]:
    """`value` as an object with its fields in camel case; None as the empty one."""
    given = mapping(value, field)
    if not any("_" in key for key in given):
        return given
    return {_camel(key): each for key, each in given.items()}


def _listed(value: Any, field: str) -> list[dict[str, Any]]:
    return [_fields(each, field) for each in objects(value, field)]


def normalise(body: dict[str, Any]) -> ModelRequest:
    given = _fields(body, "the body")
    if given.get("generateContentRequest") is not None:
        counted = _fields(given["generateContentRequest"], "generateContentRequest")
        given = {**counted, "model": given.get("model")}
    conversation = Conversation()
    notes = conversation.notes
    config = _fields(given.get("generationConfig"), "generationConfig")
    dotted = {f"generationConfig.{field}": value for field, value in config.items()}
    shared.screen({**given, **dotted}, FIELDS, REFUSED, notes)
    _check_output(config)
    conversation.system(_system_text(given.get("systemInstruction")))
    history = _History(conversation)
    for index, content in enumerate(_listed(given.get("contents"), "contents")):
        history.add(content, f"contents[{index}]")

    tools = _tools(given.get("tools"), notes)
    tools, tool_choice = _tool_choice(given.get("toolConfig"), tools, notes)
    thinking = _fields(config.get("thinkingConfig"), "generationConfig.thinkingConfig")
    if thinking.get("thinkingLevel") not in (None, "THINKING_LEVEL_UNSPECIFIED"):
        note(notes, "thinkingLevel ignored")
    budget = thinking.get("thinkingBudget")
    if budget not in (None, 0, -1):
        note(notes, "thinkingBudget ignored")
    return ModelRequest(
        model=shared.model_name(given),
        messages=conversation.finish(),
        answers=conversation.answers,
        tools=tools,
        tool_choice=tool_choice,
        max_tokens=shared.count(config.get("maxOutputTokens"), "generationConfig.maxOutputTokens"),
        sampling={
            ours: config[field]
            for field, ours in _SAMPLING.items()
            if config.get(field) not in (None, [])
        },
        response_format=_response_format(config),
        template_kwargs={"enable_thinking": False} if budget == 0 else {},
        stream=bool(given.get("stream")),
        framing="sse" if given.get("alt") == "sse" else "json_array",
        include_reasoning=bool(thinking.get("includeThoughts")),
        notes=notes,
    )


def _check_output(config: dict[str, Any]) -> None:
    if config.get("candidateCount") not in (None, 1):
        raise UnsupportedRequestError(
            "generationConfig.candidateCount",
            "one answer to a request; ask again for another sample",
        )
    if config.get("responseModalities") not in (None, [], ["TEXT"], ["MODALITY_UNSPECIFIED"]):
        raise UnsupportedRequestError(
            "generationConfig.responseModalities", "the model behind this endpoint writes text"
        )


def _response_format(config: dict[str, Any]) -> dict[str, Any] | None:
    kind = config.get("responseMimeType")
    if kind not in (None, "", "text/plain", "application/json"):
        raise UnsupportedRequestError(
            "generationConfig.responseMimeType",
            "only text/plain and application/json are supported",
        )
    schema = config.get("responseJsonSchema")
    if schema is None and config.get("responseSchema") is not None:
        schema = _json_schema(config["responseSchema"])
    if schema is not None:
        return shared.schema_format(schema)
    return {"type": "json_object"} if kind == "application/json" else None


def _system_text(instruction: Any) -> str:
    if instruction is None or isinstance(instruction, str):
        return instruction or ""
    given = _fields(instruction, "systemInstruction")
    return _text(given.get("parts"), "systemInstruction.parts")


def _text(parts: Any, field: str) -> str:
    texts = []
    for index, part in enumerate(_listed(parts or [], field)):
        if not isinstance(part.get("text"), str):
            raise UnsupportedRequestError(f"{field}[{index}]", "only text is supported here")
        texts.append(part["text"])
    return "\n".join(texts)


class _History:
    """Contents to messages. Calls and their responses belong together by id, and where harnesses
    leave the ids out, by name and order; such calls get ids of ours."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._calls = 0
        self._unanswered = _Unanswered()

    def add(self, content: dict[str, Any], where: str) -> None:
        parts = _listed(content.get("parts") or [], f"{where}.parts")
        match content.get("role"):
            case "model":
                for answer, own in _answers(parts):
                    self._add_answer(own, answer, where)
            case None | "user" | "function":
                self._add_user(parts, where)
            case "system":
                self._conversation.system(_text(parts, f"{where}.parts"))
            case other:
                raise UnsupportedRequestError(
                    f"{where}.role", f"{other!r} is none of user, model, function, system"
                )

    def _add_answer(self, parts: list[dict[str, Any]], answer: str | None, where: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            if "functionCall" in part:
                calls.append(self._call(part["functionCall"], f"{where}.functionCall"))
            elif "text" in part:
                text = string(part["text"], f"{where}.text")
                (reasoning if part.get("thought") else texts).append(text)
            elif set(part) - {"thoughtSignature", "thought"}:
                note(self._conversation.notes, f"model part {_kind(part)} ignored")
        # Joined without anything between them: they are parts of one sampled text.
        self._conversation.assistant("".join(texts), "".join(reasoning), calls, answer=answer)

    def _call(self, value: Any, field: str) -> dict[str, Any]:
        call = _fields(value, field)
        call_id = string(call.get("id"), f"{field}.id")
        has_id = bool(call_id)
        if not has_id:
            call_id = f"functionCall_{self._calls}"
        self._calls += 1
        called = string(call.get("name"), f"{field}.name")
        self._unanswered.add(call_id, called, has_id=has_id)
        return shared.tool_call(call_id, called, shared.arguments_of_object(call.get("args")))

    def _add_user(self, parts: list[dict[str, Any]], where: str) -> None:
        """Tool results first, as the template needs them right behind their calls, then the rest.

        What is no text and follows a result directly is part of it: that is how this API brings
        images that a tool returns.
        """
        notes = self._conversation.notes
        results: list[_Result] = []
        rest: list[dict[str, Any]] = []
        for index, part in enumerate(parts):
            field = f"{where}.parts[{index}]"
            if "functionResponse" in part:
                if rest:
                    note(notes, "text before tool results sent behind them")
                results.append(_result(part["functionResponse"], f"{field}.functionResponse"))
            else:
                own = results[-1].parts if results and not rest and "text" not in part else rest
                own.append(_part(part, field, notes))
        for result in results:
            content = shared.fold_parts(result.parts)
            self._conversation.tool(
                self._unanswered.take(result.call_id, result.name),
                shared.as_error(content) if result.failed else content,
            )
        if results:
            self._conversation.beside_results(rest)
        else:
            self._conversation.user(shared.fold_parts(rest))


class _Unanswered:
    """The calls that wait for their results, found in the time of a look-up."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._named: dict[tuple[str, bool], OrderedDict[str, None]] = {}
        """Ids by name, or "" for any, and whether only those of calls that were sent without one.
        A plain dict looks for its first key behind all that were taken out before it."""

    def add(self, call_id: str, name: str, *, has_id: bool) -> None:
        self._names[call_id] = name
        for key in self._keys(name):
            if not (has_id and key[1]):
                self._named.setdefault(key, OrderedDict())[call_id] = None

    def take(self, call_id: str, name: str) -> str:
        """The id of the call that a result with this id or, lacking that, this name belongs to, or
        a word for it when there is none. An id that no call has can only belong to a call that was
        sent without."""
        if call_id not in self._names:
            waiting = self._named.get((name, bool(call_id)))
            if not waiting:
                return call_id or name
            call_id = next(iter(waiting))
        for key in self._keys(self._names.pop(call_id)):
            self._named.get(key, OrderedDict()).pop(call_id, None)
        return call_id

    def _keys(self, name: str) -> set[tuple[str, bool]]:
        return {(name, False), (name, True), ("", False), ("", True)}


class _Result(NamedTuple):
    """A function's response; `call_id` and `name` may be empty."""

    call_id: str
    name: str
    failed: bool
    parts: list[dict[str, Any]]


def _result(value: Any, field: str) -> _Result:
    given = _fields(value, field)
    called = string(given.get("name"), f"{field}.name")
    response = mapping(given.get("response"), f"{field}.response")
    text = _result_text(response, called)
    parts = [shared.text_part(text)] if text else []
    parts += [
        _media(part, f"{field}.parts[{index}]")
        for index, part in enumerate(_listed(given.get("parts") or [], f"{field}.parts"))
    ]
    return _Result(
        call_id=string(given.get("id"), f"{field}.id"),
        name=called,
        failed=_is_error(response),
        parts=parts,
    )


def _is_error(response: dict[str, Any]) -> bool:
    return len(response) == 1 and isinstance(response.get("error"), str)


def _result_text(response: dict[str, Any], called: str) -> str:
    """The text that a response holds under one of the usual names; any other object as JSON."""
    match [(key, value) for key, value in response.items() if (key, value) != ("name", called)]:
        case []:
            return ""
        case [("output" | "result" | "error" | "content", str(text))]:
            return text
    return shared.compact_json(response)


def _answers(
    parts: list[dict[str, Any]],
) -> list[tuple[str | None, list[dict[str, Any]]]]:
    """A model's parts by the answer that their signatures name: a harness joins contents that
    follow each other. A part without a signature of ours belongs to the answer before it."""
    current: str | None = None
    answers: list[tuple[str | None, list[dict[str, Any]]]] = [(None, [])]
    for part in parts:
        named = completion_of(part.get("thoughtSignature"))
        if named is not None and named != current:
            if current is None:
                answers[-1] = (named, answers[-1][1])
            else:
                answers.append((named, []))
            current = named
        answers[-1][1].append(part)
    return answers


def _kind(part: dict[str, Any]) -> str:
    return "+".join(itertools.islice(part, 3)) or "without content"


def _part(part: dict[str, Any], field: str, notes: list[str]) -> dict[str, Any]:
    if "text" in part:
        return shared.text_part(string(part["text"], f"{field}.text"))
    if "inlineData" in part or "fileData" in part:
        return _media(part, field)
    note(notes, f"part {_kind(part)} sent as JSON text")
    return shared.text_part(shared.compact_json(part))


def _media(part: dict[str, Any], field: str) -> dict[str, Any]:
    data = _fields(part.get("inlineData"), f"{field}.inlineData")
    file = _fields(part.get("fileData"), f"{field}.fileData")
    media_type = string(data.get("mimeType") or file.get("mimeType"), f"{field}.mimeType")
    match data.get("data"), file.get("fileUri"):
        case str(encoded), None:
            if media_type.startswith("image/"):
                return shared.image_part(f"data:{media_type};base64,{encoded}")
            title = string(data.get("displayName"), f"{field}.displayName")
            text = shared.decoded_text(media_type, encoded, field)
            return shared.text_part(shared.document_text(title, text))
        case None, str(url):
            if media_type.startswith("image/") and url.startswith(("https://", "http://")):
                return shared.image_part(url)
    raise UnsupportedRequestError(
        field, "only images, and files of plain text as inlineData, are supported"
    )


def _tools(tools: Any, notes: list[str]) -> list[dict[str, Any]] | None:
    kept = []
    for index, tool in enumerate(_listed(tools or [], "tools")):
        for kind, value in tool.items():
            if kind != "functionDeclarations":
                note(notes, f"tool {kind} ignored")
                continue
            field = f"tools[{index}].functionDeclarations"
            kept += [_function(each, field) for each in _listed(value or [], field)]
    return kept or None


def _function(declared: dict[str, Any], field: str) -> dict[str, Any]:
    parameters = declared.get("parametersJsonSchema")
    if parameters is None and declared.get("parameters") is not None:
        parameters = _json_schema(declared["parameters"])
    return shared.function_tool(
        string(declared.get("name"), f"{field}.name"),
        string(declared.get("description"), f"{field}.description"),
        parameters,
    )


_COUNTS = frozenset(
    ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"]
)


def _json_schema(schema: Any) -> Any:
    """This API's own kind of schema as JSON schema: types in upper case, `nullable`, counts as
    strings. A JSON schema stays as it is."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for field, value in schema.items():
        match _camel(field), value:
            case "type", str():
                if value != "TYPE_UNSPECIFIED":
                    converted["type"] = value.lower()
            case "properties", dict():
                converted["properties"] = {key: _json_schema(each) for key, each in value.items()}
            case ("items" | "anyOf" | "additionalProperties") as key, _:
                converted[key] = _json_schema(value)
            case key, str() if key in _COUNTS and value.isdecimal():
                converted[key] = int(value)
            case (("nullable" | "propertyOrdering"), _):
                pass
            case key, _:
                converted[key] = value
    return _nullable(converted) if schema.get("nullable") is True else converted


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    nullable = dict(schema)
    if isinstance(schema.get("type"), str):
        nullable["type"] = [schema["type"], "null"]
    if isinstance(schema.get("anyOf"), list):
        nullable["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list):
        nullable["enum"] = [*schema["enum"], None]
    return nullable


def _tool_choice(
    config: Any, tools: list[dict[str, Any]] | None, notes: list[str]
) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools that may be called, and whether one must be."""
    given = _fields(
        _fields(config, "toolConfig").get("functionCallingConfig"),
        "toolConfig.functionCallingConfig",
    )
    mode = given.get("mode")
    if mode in (None, "MODE_UNSPECIFIED"):
        return tools, None
    if tools is None:
        if mode in ("ANY", "VALIDATED"):
            note(notes, "toolConfig without tools ignored")
        return None, None
    match mode:
        case "AUTO" | "VALIDATED":
            choice = "auto"
        case "ANY":
            choice = "required"
        case "NONE":
            return tools, "none"
        case _:
            raise UnsupportedRequestError(
                "toolConfig.functionCallingConfig.mode",
                f"{mode!r} is none of AUTO, ANY, NONE, VALIDATED",
            )
    allowed = given.get("allowedFunctionNames")
    if not isinstance(allowed, list) or not allowed or mode == "AUTO":
        return tools, choice
    field = "toolConfig.functionCallingConfig.allowedFunctionNames"
    names = {string(name, field) for name in allowed}
    kept = [tool for tool in tools if tool["function"]["name"] in names]
    if not kept:
        raise UnsupportedRequestError(field, "none of these functions is declared")
    if mode == "ANY" and len(names) == 1:
        return tools, {"type": "function", "function": {"name": allowed[0]}}
    return kept, choice
