"""A model server without a model: vLLM's API, real tokenizer, real template, scripted words.

    python -m polar_gateway.testing.engine --port 0 --script FILE

or, in a test, `async with ScriptedEngine(script) as engine: ...  engine.url`. It answers as vLLM 0.32
with the hermes and qwen3 parsers, scale-out routes and development mode does, ids and log
probabilities included, and says in `/v1/models`, in `/version` and in each answer's
`system_fingerprint` that it is scripted. What it was asked and what it said stays in `engine.calls`
and under `GET /scripted/calls`; `engine.faults` and `POST /scripted/faults` make the next calls fail,
`engine.die()` all until `engine.revive()`, and between `engine.hold()` and `engine.release()` it keeps
silent.
"""

import os
import secrets
import signal
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from polar_gateway.testing.calls import Call, Fault
from polar_gateway.testing.chat_request import (
    ApiError,
    ChatRequest,
    checked,
    decoded,
    has_media,
    refused,
)
from polar_gateway.testing.endpoint import SamplingEndpoint, spoil
from polar_gateway.testing.generate_request import DerenderRequest, GenerateRequest, converted
from polar_gateway.testing.parsing import TurnParser, thinking_open
from polar_gateway.testing.routes import get, post, scripted_routes
from polar_gateway.testing.script import Script, ScriptFile
from polar_gateway.testing.server import (
    DESCRIPTION,
    MODEL,
    VERSION,
    Pause,
    ScriptedServer,
    Wanted,
)
from polar_gateway.testing.tokenizer import RenderError
from polar_gateway.testing.vllm_answers import ChatAnswer, GenerateAnswer

__all__ = ["Call", "Fault", "ScriptedEngine"]


class _Pause(msgspec.Struct):
    mode: Pause


class ScriptedEngine(ScriptedServer):
    """vLLM's protocol; the options are those of `ScriptedServer` and what is set here."""

    def __init__(
        self,
        script: Script | ScriptFile | None = None,
        *,
        seed: int = 0,
        renders: bool = True,
        controls: bool = True,
        strict_limits: bool = False,
        lossy_streams: bool = False,
        kv_connector: str | None = None,
        routed_experts: bool = False,
        sampling_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(script, seed=seed, **options)
        self.renders = renders
        """Whether it renders, derenders and generates from tokens, as vLLM does with
        --enable-scale-out."""
        self.controls = controls
        """Whether it takes orders, as vLLM does with VLLM_SERVER_DEV_MODE=1."""
        self.strict_limits = strict_limits
        """Whether it refuses to be asked for more output than there is room for, as vLLM 0.20."""
        self.lossy_streams = lossy_streams
        """Whether tokens without text are left out of streams, as vLLM 0.10 did."""
        self.kv_connector = kv_connector
        self.routed_experts = routed_experts
        self.sampling_mask = sampling_mask
        self.fingerprint = f"scripted-{seed}"
        self.app = Starlette(
            routes=[
                Route(
                    "/v1/chat/completions",
                    SamplingEndpoint(self, self._chat, "chatcmpl-"),
                    methods=["POST"],
                ),
                Route(
                    "/inference/v1/generate",
                    SamplingEndpoint(self, self._generate, "generate-tokens-"),
                    methods=["POST"],
                ),
                post("/v1/chat/completions/render", self._render),
                post("/v1/chat/completions/derender", self._derender),
                post("/tokenize", self._tokenize),
                post("/detokenize", self._detokenize),
                get("/v1/models", self._models),
                get("/version", self._version),
                *scripted_routes(self),
                *self._control_routes(),
            ]
        )

    def _control_routes(self) -> list[Route]:
        return [
            get("/server_info", self._server_info, there=self._takes_orders),
            get("/is_paused", self._is_paused, there=self._takes_orders),
            get("/weight_info", self._weight_info, there=self._takes_orders),
            post("/pause", self._pause, there=self._takes_orders),
            post("/resume", self._resume, there=self._takes_orders),
            post("/abort_requests", self._abort_requests, there=self._takes_orders),
            post("/update_weight_version", self._update_weight_version, there=self._takes_orders),
            post("/collective_rpc", self._collective_rpc, there=self._takes_orders),
            post("/reset_prefix_cache", self._reset_prefix_cache, there=self._takes_orders),
        ]

    def _takes_orders(self) -> bool:
        return self.controls

    def room(self, prompt_ids: list[int], asked: int | None) -> int:
        """How many tokens an answer may have. Raises ApiError when there is no room for one."""
        room = self.max_model_len - len(prompt_ids)
        if self.strict_limits and asked is not None and asked > room:
            least = self.max_model_len - asked + 1
            raise refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {asked} output tokens and your prompt contains at least {least} "
                f"input tokens, for a total of at least {self.max_model_len + 1} tokens. Please "
                "reduce the length of the input prompt or the number of requested output tokens. "
                f"(parameter=input_tokens, value={least})",
                "input_tokens",
            )
        if room < 1:
            least = self.max_model_len + 1
            raise refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt contains at least {least} input tokens, which exceeds this limit "
                "even without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={least})",
                "input_tokens",
            )
        return room if asked is None else min(room, asked)

    async def _chat(self, call: Call, raw: bytes, fault: Fault) -> ChatAnswer:
        call.request = decoded(raw)
        request = checked(call.request, self.model, self.max_model_len)
        await spoil(self, fault)
        call.prompt_token_ids = self._prompt_ids(request)
        call.prompt = self.tokenizer.decode(call.prompt_token_ids)
        wanted = Wanted(
            limit=self.room(call.prompt_token_ids, request.max_tokens),
            temperature=request.temperature,
            seed=request.seed,
            stop=request.stop,
            only=request.allowed_token_ids,
            single_call=request.parse_tools and not request.parallel_tool_calls,
        )
        if fault.error_after is not None and not request.stream:
            raise ApiError(500, fault.message, "InternalServerError")
        return ChatAnswer(
            self,
            self.answer(call, wanted, fault),
            request,
            thinking=thinking_open(call.prompt),
            lossy=self.lossy_streams,
            routed_experts=self.routed_experts,
            fingerprint=self.fingerprint,
        )

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        """Those that the request says, but not beside images. Raises ApiError."""
        given = None if self.ignores_token_ids else request.prompt_ids
        if given is None or has_media(request.messages):
            return self._rendered(request.messages, request.tools, request.template_arguments)
        self._check_vocabulary(given, "kv_transfer_params.prompt_token_ids")
        return given

    def _check_vocabulary(self, ids: list[int], param: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.tokenizer.size:
                raise refused(
                    f"Token id {token_id} is out of vocabulary (parameter={param})", param
                )

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> list[int]:
        """Raises ApiError when the template refuses."""
        try:
            return self.tokenizer.encode(self.render(messages, tools, **arguments))
        except RenderError as error:
            raise refused(str(error)) from error

    async def _generate(self, call: Call, raw: bytes, fault: Fault) -> GenerateAnswer:
        self._check_scale_out()
        call.request = decoded(raw)
        request = converted(call.request, GenerateRequest)
        if request.request_id is not None:
            call.request_id = f"generate-tokens-{request.request_id}"
        await spoil(self, fault)
        self._check_vocabulary(request.token_ids, "token_ids")
        call.prompt_token_ids = request.token_ids
        call.prompt = self.tokenizer.decode(request.token_ids)
        wanted = Wanted(
            limit=self.room(request.token_ids, request.sampling_params.max_tokens),
            temperature=request.sampling_params.temperature,
            seed=request.sampling_params.seed,
            stop=request.stop,
            only=request.sampling_params.allowed_token_ids or [],
        )
        if fault.error_after is not None and not request.stream:
            raise ApiError(500, fault.message, "InternalServerError")
        return GenerateAnswer(
            self,
            self.answer(call, wanted, fault),
            request,
            routed_experts=self.routed_experts,
            sampling_mask=self.sampling_mask,
        )

    def _check_scale_out(self) -> None:
        if not self.renders:
            raise ApiError(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")

    async def _render(self, request: Request) -> dict[str, Any]:
        self._check_scale_out()
        asked = checked(decoded(await request.body()), self.model, self.max_model_len)
        ids = self._prompt_ids(asked)
        limit = self.room(ids, asked.max_tokens)
        thinking = thinking_open(self.tokenizer.decode(ids))
        return {
            "request_id": f"chatcmpl-{secrets.token_hex(8)}",
            "token_ids": ids,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {
                "temperature": asked.temperature,
                "stop": asked.stop,
                "seed": asked.seed,
                "max_tokens": limit,
                "logprobs": asked.top_logprobs if asked.logprobs else None,
                "allowed_token_ids": asked.allowed_token_ids or None,
            },
            "model": self.model,
            "reasoning_ended": not thinking,
            "reasoning_parser_kwargs": {"chat_template_kwargs": asked.template_arguments},
            "return_token_ids": asked.return_token_ids or None,
            "output_mode": "tokens",
            "stream": asked.stream,
            "stream_options": {"include_usage": True} if asked.include_usage else None,
            "cache_salt": None,
            "priority": 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    async def _derender(self, request: Request) -> dict[str, Any]:
        """As in vLLM, the answer begins inside its reasoning unless the chat request's template
        arguments say otherwise."""
        self._check_scale_out()
        asked = converted(decoded(await request.body()), DerenderRequest)
        chat = checked(asked.chat_request, self.model, self.max_model_len)
        generated = asked.generate_response
        [choice] = generated.choices
        if not choice.token_ids:
            raise refused(f"choice {choice.index} has empty or null token_ids")
        thinking = chat.template_arguments.get("enable_thinking") is not False
        parser = TurnParser(thinking=thinking, tools=chat.parse_tools)
        for token_id, text in self.tokenizer.texts(choice.token_ids):
            parser.feed(self.tokenizer.bytes_of[token_id], text)
        message = parser.message()
        for called in message.get("tool_calls", []):
            called["id"] = secrets.token_hex(8)
        sampled = len(choice.token_ids)
        return {
            "id": generated.request_id,
            "object": "chat.completion",
            "created": 0,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": choice.logprobs,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.token_ids if chat.return_token_ids else None,
                    "routed_experts": None,
                }
            ],
            "system_fingerprint": None,
            "usage": {
                "prompt_tokens": asked.prompt_tokens,
                "total_tokens": asked.prompt_tokens + sampled,
                "completion_tokens": sampled,
            },
            "prompt_token_ids": None,
        }

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        """As in vLLM, tools reach the template as they came, which the chat endpoint's do not."""
        body = decoded(await request.body())
        prompt = body.get("prompt")
        if prompt is None:
            arguments = {
                **(body.get("chat_template_kwargs") or {}),
                "add_generation_prompt": body.get("add_generation_prompt", True),
            }
            ids = self._rendered(body["messages"], body.get("tools"), arguments)
        else:
            ids = self.tokenizer.encode(prompt)
        return {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }

    async def _detokenize(self, request: Request) -> dict[str, Any]:
        ids = decoded(await request.body())["tokens"]
        self._check_vocabulary(ids, "tokens")
        return {"prompt": self.tokenizer.decode(ids)}

    async def _models(self, _: Request) -> dict[str, Any]:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "scripted",
            "description": DESCRIPTION,
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
        return {"object": "list", "data": [card]}

    async def _version(self, _: Request) -> dict[str, Any]:
        return {"version": VERSION}

    async def _server_info(self, request: Request) -> dict[str, Any]:
        mode = "processed_logprobs" if self.processed_logprobs else "raw_logprobs"
        connector = self.kv_connector
        config: Any = {
            "model_config": {"model": self.model, "logprobs_mode": mode},
            "kv_transfer_config": {"kv_connector": connector} if connector else None,
        }
        if request.query_params.get("config_format") != "json":
            config = f"model='{self.model}'"
        return {"vllm_config": config, "vllm_env": {}, "system_env": {}}

    async def _pause(self, request: Request) -> dict[str, Any]:
        mode = request.query_params.get("mode", "abort")
        await self.pause(converted({"mode": mode}, _Pause).mode)
        return {"status": "paused"}

    async def _resume(self, _: Request) -> dict[str, Any]:
        self.resume()
        return {"status": "resumed"}

    async def _is_paused(self, _: Request) -> dict[str, Any]:
        return {"is_paused": self.paused is not None}

    async def _abort_requests(self, request: Request) -> dict[str, Any]:
        named = decoded(await request.body()).get("request_ids")
        return {"status": "aborted", "aborted": self.abort(named or None)}

    async def _update_weight_version(self, request: Request) -> dict[str, Any]:
        version = decoded(await request.body())["new_version"]
        self.name_weights(version)
        return {"success": True, "new_version": version}

    async def _weight_info(self, _: Request) -> dict[str, Any]:
        return {"weight_version": self.weight_version}

    async def _collective_rpc(self, request: Request) -> dict[str, Any]:
        body = decoded(await request.body())
        if body.get("method") != "reload_weights":
            raise refused(f"the scripted engine cannot {body.get('method')}", "method")
        self.load_weights((body.get("kwargs") or {}).get("weights_path"))
        return {"results": [None]}

    async def _reset_prefix_cache(self, _: Request) -> dict[str, Any]:
        return {"success": True}


async def _run(engine: ScriptedEngine, ready_file: Path | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with engine:
            click.echo(f"{engine.url}  {DESCRIPTION}")
            if ready_file is not None:
                unfinished = ready_file.with_suffix(".part")
                unfinished.write_text(engine.url)
                os.replace(unfinished, ready_file)
            await anext(aiter(signals))


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0 takes a free one.")
@click.option("--script", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default=MODEL, show_default=True, help="The name it serves under.")
@click.option("--max-model-len", default=131_072, show_default=True)
@click.option("--token-delay", default=0.0, show_default=True, help="Seconds between tokens.")
@click.option("--keep-calls", default=256, show_default=True, help="How many calls to remember.")
@click.option("--seed", default=0, show_default=True)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Gets the URL once it answers.")
def main(
    host: str,
    port: int,
    path: Path | None,
    model: str,
    max_model_len: int,
    token_delay: float,
    keep_calls: int,
    seed: int,
    ready_file: Path | None,
) -> None:
    """Serve a scripted engine until SIGINT or SIGTERM. It is no model."""
    engine = ScriptedEngine(
        ScriptFile(path) if path else None,
        host=host,
        port=port,
        model=model,
        max_model_len=max_model_len,
        token_delay=token_delay,
        keep_calls=keep_calls,
        seed=seed,
    )
    anyio.run(_run, engine, ready_file)


if __name__ == "__main__":
    main()
