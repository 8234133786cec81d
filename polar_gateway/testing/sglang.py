"""A server that speaks SGLang's documented protocol, with scripted words instead of a model.

`async with ScriptedSglang(script) as engine: ...  engine.url`. It shares tokenizer, template, policy
and faults with the scripted engine, and answers as SGLang 0.5.23 with the qwen3 reasoning parser and
the qwen25 tool parser does on the routes that a rollout needs.
"""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_gateway.testing.calls import Call, Fault
from polar_gateway.testing.chat_request import ApiError, ChatRequest, checked, decoded, has_media
from polar_gateway.testing.endpoint import SamplingEndpoint, spoil
from polar_gateway.testing.generate_request import converted
from polar_gateway.testing.parsing import TurnParser, thinking_open
from polar_gateway.testing.routes import Handler, get, post, scripted_routes
from polar_gateway.testing.script import Script, ScriptFile
from polar_gateway.testing.server import VERSION, Pause, ScriptedServer, Wanted
from polar_gateway.testing.sglang_answers import ChatAnswer, Shown
from polar_gateway.testing.tokenizer import RenderError

REASONING_PARSER = "qwen3"
TOOL_PARSER = "qwen25"
_PAUSES: dict[str, Pause] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class ScriptedSglang(ScriptedServer):
    """The options are those of `ScriptedServer` and what is set here."""

    def __init__(
        self,
        script: Script | ScriptFile | None = None,
        *,
        returns_ids: bool = True,
        streams_ids: bool = True,
        renders: bool = True,
        version_spans: bool = True,
        routed_experts: bool = False,
        original_logprobs: bool = False,
        parsers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(script, processed_logprobs=not original_logprobs, **options)
        self.returns_ids = returns_ids
        """Whether it knows the fields that ask for ids; versions before those ignore them."""
        self.streams_ids = streams_ids
        self.renders = renders
        """Whether /tokenize takes messages."""
        self.version_spans = version_spans
        self.routed_experts = routed_experts
        self.parsers = parsers
        self.app = Starlette(
            routes=[
                Route(
                    "/v1/chat/completions",
                    SamplingEndpoint(self, self._chat, ""),
                    methods=["POST"],
                ),
                *(get(path, self._server_info) for path in ("/server_info", "/get_server_info")),
                *(get(path, self._model_info) for path in ("/model_info", "/get_model_info")),
                *(_post(path, self._tokenize) for path in ("/tokenize", "/v1/tokenize")),
                *(_post(path, self._detokenize) for path in ("/detokenize", "/v1/detokenize")),
                get("/v1/models", self._models),
                get("/v1/loads", self._loads),
                _post("/pause_generation", self._pause),
                _post("/continue_generation", self._continue),
                _post("/abort_request", self._abort_request),
                _post("/update_weights_from_disk", self._update_weights_from_disk),
                _post("/update_weight_version", self._update_weight_version),
                Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),
                _post("/separate_reasoning", self._separate_reasoning),
                _post("/parse_function_call", self._parse_function_call),
                *scripted_routes(self),
            ]
        )

    async def _chat(self, call: Call, raw: bytes, fault: Fault) -> ChatAnswer:
        try:
            return await self._taken_on(call, raw, fault)
        except ApiError as error:
            raise _refused(str(error), error.status) from error

    async def _taken_on(self, call: Call, raw: bytes, fault: Fault) -> ChatAnswer:
        call.request = decoded(raw)
        request = checked(call.request, self.model, 1 << 40)
        call.request_id = call.request.get("rid") or call.request_id
        shown = self._shown(call.request)
        if request.stream and (
            shown.return_prompt_token_ids or shown.return_token_ids or shown.return_meta_info
        ):
            raise _refused("return_token_ids is not supported with streaming.")
        await spoil(self, fault)
        call.prompt_token_ids = self._prompt_ids(call.request, request)
        call.prompt = self.tokenizer.decode(call.prompt_token_ids)
        wanted = Wanted(
            limit=self._room(call.prompt_token_ids, request.max_tokens),
            temperature=request.temperature,
            seed=request.seed,
            stop=request.stop,
            only=[
                int(i) for i, bias in (call.request.get("logit_bias") or {}).items() if bias > 50
            ],
            single_call=request.parse_tools and not request.parallel_tool_calls,
        )
        if fault.error_after is not None and not request.stream:
            raise _refused(fault.message, 500)
        return ChatAnswer(
            self,
            self.answer(call, wanted, fault),
            request,
            shown,
            parser=TurnParser(thinking=thinking_open(call.prompt), tools=request.parse_tools)
            if self.parsers
            else None,
            spans=self.version_spans,
        )

    def _shown(self, document: dict[str, Any]) -> Shown:
        if not self.returns_ids:
            return Shown()
        shown = converted(document, Shown)
        if not self.streams_ids:
            shown.return_input_ids_in_sglext = shown.return_output_ids_in_sglext = False
        shown.return_routed_experts &= self.routed_experts
        return shown

    def _prompt_ids(self, document: dict[str, Any], request: ChatRequest) -> list[int]:
        given: list[int] | None = None if self.ignores_token_ids else document.get("input_ids")
        if given is None or has_media(request.messages):
            return self._rendered(request.messages, request.tools, request.template_arguments)
        self._check_vocabulary(given)
        return given

    def _check_vocabulary(self, ids: list[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.tokenizer.size:
                raise _refused(f"Token id {token_id} is out of vocabulary.")

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> list[int]:
        try:
            return self.tokenizer.encode(self.render(messages, tools, **arguments))
        except RenderError as error:
            raise _refused(str(error)) from error

    def _room(self, prompt_ids: list[int], asked: int | None) -> int:
        prompt, limit = len(prompt_ids), self.max_model_len
        if prompt >= limit:
            raise _refused(
                f"The input ({prompt} tokens) is longer than the model's context length "
                f"({limit} tokens)."
            )
        if asked is not None and prompt + asked > limit:
            raise _refused(
                f"Requested token count exceeds the model's maximum context length of {limit} "
                f"tokens. You requested a total of {prompt + asked} tokens: {prompt} tokens from "
                f"the input messages and {asked} tokens for the completion. Please reduce the "
                "number of tokens in the input messages or the completion to fit within the limit."
            )
        return limit - prompt if asked is None else asked

    async def _server_info(self, _: Request) -> dict[str, Any]:
        return {
            "model_path": self.model,
            "reasoning_parser": REASONING_PARSER if self.parsers else None,
            "tool_call_parser": TOOL_PARSER if self.parsers else None,
            "context_length": None,
            "disaggregation_mode": "null",
            "enable_return_routed_experts": self.routed_experts,
            "version": VERSION,
        }

    async def _model_info(self, _: Request) -> dict[str, Any]:
        return {"model_path": self.model, "weight_version": self.weight_version}

    async def _models(self, _: Request) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "owned_by": "scripted", "root": self.model}
        return {"object": "list", "data": [{**card, "max_model_len": self.max_model_len}]}

    async def _loads(self, _: Request) -> dict[str, Any]:
        running = sum(answer.begun for answer in self.in_flight)
        waiting = len(self.in_flight) - running
        return {"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]}

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        messages = body.get("messages")
        if messages is None:
            ids = self.tokenizer.encode(body["prompt"])
        elif self.renders:
            chat = checked({**body, "model": self.model}, self.model, 1 << 40)
            ids = self._rendered(messages, chat.tools, chat.template_arguments)
        else:
            raise _refused("prompt: Field required")
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    async def _detokenize(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        self._check_vocabulary(body["tokens"])
        return {"text": self.tokenizer.decode(body["tokens"])}

    async def _pause(self, request: Request) -> dict[str, Any]:
        mode = decoded(await request.body()).get("mode", "abort")
        if mode not in _PAUSES:
            raise _refused(f"mode must be one of {', '.join(_PAUSES)}, not {mode}")
        await self.pause(_PAUSES[mode])
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, _: Request) -> dict[str, Any]:
        self.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _abort_request(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        self.abort(None if body.get("abort_all") else [body.get("rid", "")])
        return {}

    async def _update_weights_from_disk(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        if body.get("abort_all_requests"):
            self.abort()
        self.load_weights(body["model_path"])
        if body.get("weight_version") is not None:
            self.name_weights(body["weight_version"])
        return {"success": True, "message": "Succeeded to update model weights."}

    async def _update_weight_version(self, request: Request) -> dict[str, Any]:
        """Aborts everything unless it is told not to."""
        body = decoded(await request.body())
        if body.get("abort_all_requests", True):
            self.abort()
        self.name_weights(body["new_version"])
        return {"success": True, "new_version": body["new_version"]}

    async def _flush_cache(self, _: Request) -> Response:
        """Refused while something is being sampled, but not while all of it stands still."""
        busy = any(answer.begun for answer in self.in_flight) and self.paused is None
        return Response(
            "Flush cache failed.\n" if busy else "Cache flushed.\n", 400 if busy else 200
        )

    async def _separate_reasoning(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        if body["reasoning_parser"] != REASONING_PARSER:
            raise _refused(f"Unsupported model type: {body['reasoning_parser']}")
        thought, closing, said = body["text"].partition("</think>")
        if not closing and not thought.startswith("<think>"):
            thought, said = "", thought
        return {"reasoning_text": thought.removeprefix("<think>"), "text": said}

    async def _parse_function_call(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        if body["tool_call_parser"] != TOOL_PARSER:
            raise _refused(f"Unsupported tool_call_parser: {body['tool_call_parser']}")
        parser = TurnParser(thinking=False, tools=True)
        for token_id, text in self.tokenizer.texts(self.tokenizer.encode(body["text"])):
            parser.feed(self.tokenizer.bytes_of[token_id], text)
        message = parser.message()
        calls = [
            {"tool_index": index, **_named(call["function"])}
            for index, call in enumerate(message.get("tool_calls", []))
        ]
        return {"normal_text": message["content"] or "", "calls": calls}


def _named(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "parameters": function["arguments"]}


def _refused(message: str, status: int = 400) -> ApiError:
    error = ApiError(status, message, "BadRequestError")
    error.document = {
        "object": "error",
        "message": message,
        "type": "BadRequestError" if status == 400 else str(status),
        "param": None,
        "code": status,
    }
    return error


def _post(path: str, handler: Handler) -> Route:
    """A control or helper route, whose refusals have SGLang's shape."""

    async def answer(request: Request) -> Any:
        try:
            return await handler(request)
        except ApiError as error:
            raise _refused(str(error), error.status) from error

    return post(path, answer)
