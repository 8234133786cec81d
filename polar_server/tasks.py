"""Tasks as documents: checked on the way in, turned into dispatches and results on the way out.

Everything here is pure. Names of strategies are checked against what live nodes offer and, while
no node has said what it offers, against what is installed here; settings against the plug-in's own
struct where it is installed.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

import builders
import evaluators
import harness_adapters
from builders.base import SpecError, StrategySpec, convert_config
from harness_adapters.base import AgentSpec
from polar_gateway.errors import Failure
from polar_gateway.protocol import (
    NodeOffers,
    RuntimeSpec,
    SessionDispatchRequest,
    SessionResult,
    can_be_called,
    check_env,
    valid_id,
)
from polar_server import errors
from polar_server.placement import Needs
from polar_server.protocol import TaskRequest

logger = logging.getLogger(__name__)

NETWORKS = ("none", "bridge", "host", None)
"""What docker and local understand by `runtime.network`."""


class Installed(msgspec.Struct, frozen=True):
    """The plug-ins of this machine by name; nodes may have others."""

    adapters: Mapping[str, Any]
    builders: Mapping[str, Any]
    evaluators: Mapping[str, Any]


@cache
def installed() -> Installed:
    """Load the plug-ins once; one that is broken is reported and left out."""
    loaded = (
        harness_adapters.load_adapters(),
        builders.load_builders(),
        evaluators.load_evaluators(),
    )
    for _, problems in loaded:
        for problem in problems:
            logger.warning("%s", problem)
    return Installed(*(registry for registry, _ in loaded))


class CheckedTask(msgspec.Struct, kw_only=True, frozen=True):
    """A task that may be run."""

    request: TaskRequest
    canonical: bytes
    """The request with every default spelled out and keys sorted: equal bytes are equal tasks."""
    needs: Needs


def check_task(body: bytes | bytearray, offers: Collection[NodeOffers]) -> CheckedTask:
    """Decode and check a submitted task. Raises RefusalError naming the field."""
    request = decode(body, TaskRequest)
    if request.agent.import_path is not None:
        raise _names_a_module("agent.import_path", request.agent.import_path)
    if request.runtime is not None and request.runtime.import_path is not None:
        raise _names_a_module("runtime.import_path", request.runtime.import_path)
    if request.callback_url is not None:
        check_url("callback_url", request.callback_url)
    try:
        check_env(request.agent.env)
    except ValueError as error:
        raise errors.invalid(str(error), "agent.env") from error
    here = installed()
    harness = request.agent.harness or ""
    _check_name("agent.harness", harness, [o.harnesses for o in offers], here.adapters)
    if harness in here.adapters:
        _check_agent(request.agent)
    _check_strategy("builder", request.builder, [o.builders for o in offers], here.builders)
    if request.evaluator is not None:
        _check_strategy(
            "evaluator", request.evaluator, [o.evaluators for o in offers], here.evaluators
        )
    if request.runtime is not None:
        _check_name("runtime.backend", request.runtime.backend, [o.runtimes for o in offers], None)
        _check_runtime(request.runtime)
    return CheckedTask(
        request=request,
        canonical=msgspec.json.encode(request, order="sorted"),
        needs=Needs(
            harness=harness,
            runtime=request.runtime.backend if request.runtime else None,
            builder=request.builder.strategy,
            evaluator=request.evaluator.strategy if request.evaluator else None,
        ),
    )


def decode(body: bytes | bytearray, document: Any) -> Any:
    """Decode a JSON body. Raises RefusalError: 400 for what is not JSON, 422 naming the field."""
    try:
        return msgspec.json.decode(body, type=document)
    except msgspec.ValidationError as error:
        message, field = locate(str(error))
        raise errors.invalid(message, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.malformed(f"the body is not JSON: {error}") from error


_AT = re.compile(r" - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)
_OWN_FIELD = re.compile(r"(?:missing required|unknown) field `(?P<name>.*)`$")


def locate(message: str) -> tuple[str, str | None]:
    """Split msgspec's message into what is wrong and where: `("...", "runtime.prepare[0].cwd")`.

    The path of a missing or unknown field includes that field.
    """
    at = _AT.search(message)
    path = at["path"] if at else ""
    text = message[: at.start()] if at else message
    if own := _OWN_FIELD.search(text):
        path = f"{path}.{own['name']}"
    return text, path.lstrip(".") or None


def _check_name(
    field: str, name: str, offered: Iterable[list[str]], known: Collection[str] | None
) -> None:
    """Refuse a name that no live node offers, or, while none has made an offer, that is unknown."""
    if ":" in name:
        raise _names_a_module(field, name)
    stated = {name for names in offered for name in names}
    if stated:
        if name not in stated:
            raise errors.invalid(
                f"no live node offers {name!r}; offered: {', '.join(sorted(stated))}", field
            )
    elif known is not None and name not in known:
        raise errors.invalid(f"{name!r} is not known; known: {', '.join(sorted(known))}", field)


def _check_strategy(
    field: str, spec: StrategySpec, offered: Iterable[list[str]], known: Mapping[str, Any]
) -> None:
    _check_name(f"{field}.strategy", spec.strategy, offered, known)
    if spec.strategy in known:
        try:
            convert_config(spec.config, known[spec.strategy].Config, f"{field}.config")
        except SpecError as error:
            raise errors.invalid(
                str(error).removeprefix(f"{error.field}: "), error.field
            ) from error


def _check_agent(agent: AgentSpec) -> None:
    try:
        harness_adapters.check_settings(agent)
    except ValueError as error:
        field, colon, message = str(error).partition(": ")
        if not colon or not field.startswith("agent"):
            raise errors.invalid(str(error), "agent") from error
        raise errors.invalid(message, field) from error


def _check_runtime(spec: RuntimeSpec) -> None:
    """What can be said of the two runtimes that every node may have, without having them here."""
    if spec.backend not in ("docker", "local"):
        return
    if spec.network not in NETWORKS:
        known = ", ".join(name for name in NETWORKS if name)
        raise errors.invalid(f"{spec.network!r} is not known; known: {known}", "runtime.network")
    if spec.backend == "docker" and not spec.image:
        raise errors.invalid("docker needs an image", "runtime.image")
    if spec.backend == "local" and not spec.allow_internet:
        raise errors.invalid("local cannot keep the internet away", "runtime.allow_internet")
    if spec.backend == "local" and spec.network == "none":
        raise errors.invalid("local cannot keep the network away", "runtime.network")


def check_url(field: str, url: str) -> None:
    """Refuse a URL that can never be called. Raises RefusalError naming the field."""
    if not can_be_called(url):
        raise errors.invalid(f"{url!r} is not an http or https URL that can be called", field)


def _names_a_module(field: str, value: str) -> errors.RefusalError:
    return errors.invalid(
        f"{value!r} names a module; a request may only name installed plug-ins", field
    )


def check_id(kind: str, value: str) -> str:
    """Return an id from a path. Raises RefusalError (404) for one that nothing can have."""
    if not valid_id(value):
        raise errors.not_found(f"{value!r} is not the id of a {kind}")
    return value


def dispatch_request(
    request: TaskRequest, *, session_id: str, attempt_id: str, callback_url: str
) -> SessionDispatchRequest:
    """What a node is sent for one attempt of one session of a task."""
    return SessionDispatchRequest(
        session_id=session_id,
        task_id=request.task_id,
        attempt_id=attempt_id,
        instruction=request.instruction,
        remaining_timeout_seconds=request.timeout_seconds,
        runtime=request.runtime,
        agent=request.agent,
        builder=request.builder,
        evaluator=request.evaluator,
        callback_url=callback_url,
        metadata=request.metadata,
        sampling=request.sampling,
        prompting=request.prompting,
        dispatch_priority=request.dispatch_priority,
        init_timeout_seconds=request.init_timeout_seconds,
        postrun_timeout_seconds=request.postrun_timeout_seconds,
    )


def unreported_result(
    request: TaskRequest,
    *,
    session_id: str,
    attempt_id: str | None,
    node_id: str | None,
    failure: Failure,
) -> SessionResult:
    """The result of a session whose end no node reported."""
    return SessionResult(
        session_id=session_id,
        task_id=request.task_id,
        attempt_id=attempt_id or "",
        node_id=node_id,
        status="ERROR",
        error=failure.message,
        failure=failure,
        metadata=request.metadata,
    )
