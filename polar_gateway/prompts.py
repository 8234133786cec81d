"""How the engine is asked: with messages, which it renders, or with the prompt's ids.

With ids, the prompt is what was recorded of the call that the request continues, sampled tokens and
all, and then only what is new. What is new is cut out of renderings that the engine itself makes
(`capture.interstitial`). Wherever that cannot be done, or not without doubt, the engine is asked
with messages and the record says why; so it is for the first call of every conversation.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio
import msgspec

from builders.echoes import wording
from builders.records import Ids, Mode
from polar_gateway.capture.forest import Node
from polar_gateway.capture.interstitial import (
    Frame,
    added_behind_first_end,
    added_past_markup,
    canonical_answer,
    composed,
)
from polar_gateway.capture.session import OpenCall
from polar_gateway.config import InferenceConfig
from polar_gateway.dialects.turn import ModelRequest
from polar_gateway.engines.base import Engine, EngineError, EngineProbe, Rendering
from polar_gateway.protocol import Prompting

TOKEN_IN_IGNORED = "token_in_ignored"
HISTORY_REWRITTEN = "history_rewritten"
HISTORY_KEPT = "history_kept"

Message = dict[str, Any]


class Composition(NamedTuple):
    """How one call is asked, and what is to be said of that."""

    request: ModelRequest
    mode: Mode
    notes: Sequence[str] = ()
    findings: Sequence[str] = ()


class Added(NamedTuple):
    """What a request adds to the answer that it continues; or why that cannot be said."""

    ids: Ids | None
    why_not: str = ""
    finding: str = ""
    answer: Ids | None = None
    """The answer that is continued, as the engine renders it, where that can be told."""
    followed: Rendering | None = None
    """The whole request, as the engine renders it."""


REWRITTEN = Added(None, "the template leaves out what it had rendered", HISTORY_REWRITTEN)


def unable(probe: EngineProbe) -> str:
    """Why this engine cannot be asked with ids; empty where it can."""
    if not probe.token_routes:
        return "the engine takes no prompts as ids"
    if probe.kv_connector:
        return "the engine moves KV caches by the field in which it would be sent ids"
    if probe.renders == "none":
        return "the engine does not tell how it renders messages"
    if not probe.end_of_turn_ids:
        return "the engine does not tell which ids end a turn"
    return ""


class Prompter:
    """Composes the prompts of one session's calls."""

    def __init__(
        self, config: InferenceConfig | None = None, wanted: Prompting | None = None
    ) -> None:
        """`wanted` is the task's own word."""
        config, wanted = config or InferenceConfig(), wanted or Prompting()
        self._prompts = wanted.prompts or config.prompts
        self._history = wanted.history or config.history
        self._distrusted: set[str] = set()
        """Calls whose prompt the engine read otherwise than it was sent, and all after them."""
        self._closings: dict[bool, int | None] = {}
        """For answers without and with tool calls: how many ids a closed rendering has from the
        answer's end of turn on."""

    async def compose(
        self, request: ModelRequest, record: OpenCall, engine: Engine, probe: EngineProbe
    ) -> ModelRequest:
        """The request as the engine is to be sent it, noted on the record. Raises EngineError
        where asking again may help."""
        asked = await self._composition(request, record, engine, probe)
        record.composed(asked.mode, notes=asked.notes, findings=asked.findings)
        return asked.request

    def instead(
        self, request: ModelRequest, read: Ids | None, record: OpenCall
    ) -> ModelRequest | None:
        """What the engine is to be asked instead, where it says that it has read other ids than it
        was sent: the same with messages, with which this branch of the session goes on."""
        if request.prompt_ids is None or not read or read == request.prompt_ids:
            return None
        self._distrusted.add(record.completion_id)
        record.composed("messages", findings=[TOKEN_IN_IGNORED])
        return msgspec.structs.replace(request, prompt_ids=None)

    async def _composition(
        self, request: ModelRequest, record: OpenCall, engine: Engine, probe: EngineProbe
    ) -> Composition:
        previous = record.previous
        if self._prompts == "messages" or previous is None:
            return Composition(request, "messages")
        if why_not := unable(probe):
            if self._prompts == "auto":
                return Composition(request, "messages")
            return _with_messages(request, why_not)
        if previous.completion_id in self._distrusted:
            self._distrusted.add(record.completion_id)
            return _with_messages(request, "the engine read another prompt before")
        if _has_media(request.messages):
            return _with_messages(request, "there are media in it")
        if not previous.sampled_ids or not previous.prompt_length:
            return _with_messages(request, "the tokens before it are not known")
        added = await self._added(request, record.previous_messages, previous, engine, probe)
        if added.ids is None:
            return _with_messages(request, added.why_not, added.finding)
        rendering = b""
        if added.followed is not None:
            record.canonical_length, rendering = len(added.followed), added.followed.text
        if added.answer is not None:
            record.rendered(added.answer)
        context = previous.prompt_ids + previous.sampled_ids[: record.continued_tokens]
        return Composition(
            msgspec.structs.replace(
                request, prompt_ids=composed(context, added.ids), rendering=rendering
            ),
            "tokens",
            findings=[added.finding] if added.finding else [],
        )

    async def _added(
        self, request: ModelRequest, known: int, previous: Node, engine: Engine, probe: EngineProbe
    ) -> Added:
        """What the messages from `known` on add to the answer that is the last one before them,
        which is that of `previous`."""
        if probe.renders == "suffix":
            return await self._added_unseen(request, known, engine, probe)
        closed, followed, closing = await self._rendered(request, known, engine, probe)
        if isinstance(followed, EngineError):
            # It refuses the history, such as malformed arguments; what is new may be fine.
            return await self._added_unseen(request, known, engine, probe)
        if isinstance(closed, EngineError):
            return await _added_behind_first_end(request, known, followed, engine, probe)
        if closing is None:
            return Added(None, "the template does not show where an answer ends")
        ids = followed.after(closed, less=closing)
        if ids is None:
            ids = await _added_past_markup(request, known, closed, followed, closing, engine, probe)
        if ids is not None:
            answer = _rendered_answer(previous, closed, closing)
            return _added(ids, probe)._replace(answer=answer, followed=followed)
        if self._history == "template":
            return REWRITTEN
        added = await _added_to_small(request, known, engine, probe)
        return REWRITTEN if added.ids is None else added._replace(finding=HISTORY_KEPT)

    async def _added_unseen(
        self, request: ModelRequest, known: int, engine: Engine, probe: EngineProbe
    ) -> Added:
        """What a request adds to a conversation that the engine does not render."""
        added = await _added_to_small(request, known, engine, probe)
        if not _may_rewrite(request.messages, known):
            return added
        if self._history == "template":
            return Added(None, "nobody knows whether the template keeps earlier reasoning")
        return added._replace(finding=HISTORY_KEPT if added.ids else "")

    async def _rendered(
        self, request: ModelRequest, known: int, engine: Engine, probe: EngineProbe
    ) -> tuple[Rendering | EngineError, Rendering | EngineError, int | None]:
        """The conversation up to the answer, closed, and the whole request; and how many ids the
        first has from the answer's end of turn on."""
        wanted = [_Wanted(_first(request, known), closed=True), _Wanted(request)]
        calls = bool(request.messages[known - 1].get("tool_calls"))
        if calls not in self._closings:
            wanted += _small(request, _some_answer(calls))
        closed, followed, *small = await _renderings(engine, wanted)
        if small:
            frame = _frame(small)
            self._closings[calls] = frame and frame.closing(probe.end_of_turn_ids)
        return closed, followed, self._closings[calls]


async def _added_behind_first_end(
    request: ModelRequest, known: int, followed: Rendering, engine: Engine, probe: EngineProbe
) -> Added:
    """What follows the answer's first end of turn, for templates that render no conversation which
    ends with an answer. An end of turn in the answer's own text would be taken for it."""
    texts = probe.end_of_turn_texts
    said = wording(request.messages[known - 1])
    if len(texts) < len(probe.end_of_turn_ids) or any(text in said for text in texts):
        return Added(None, "the engine does not render where the answer ends")
    (before,) = await _renderings(engine, [_Wanted(_first(request, known - 1), closed=True)])
    if isinstance(before, EngineError):
        return Added(None, "the engine does not render what comes before the answer")
    return _added(added_behind_first_end(before.ids, followed.ids, probe.end_of_turn_ids), probe)


async def _added_past_markup(
    request: ModelRequest,
    known: int,
    closed: Rendering,
    followed: Rendering,
    closing: int,
    engine: Engine,
    probe: EngineProbe,
) -> Ids | None:
    """What the request adds, where only the template's markup of a last turn stands in between."""
    answer, new = request.messages[known - 1], request.messages[known:]
    last = _small(request, answer)
    earlier = _small(request, answer, _alike(new))
    renderings = await _renderings(engine, [*last, *earlier])
    small, gone_on = _frame(renderings[:2]), _frame(renderings[2:])
    ends = probe.end_of_turn_ids
    small_closing, following = small and small.closing(ends), gone_on and gone_on.following(ends)
    if small is None or gone_on is None or small_closing is None or following is None:
        return None
    return added_past_markup(
        closed.ids[: len(closed.ids) - closing],
        followed.ids,
        small.one[: len(small.one) - small_closing],
        gone_on.one[: len(gone_on.one) - following],
    )


async def _added_to_small(
    request: ModelRequest, known: int, engine: Engine, probe: EngineProbe
) -> Added:
    """What the request adds, as it is rendered behind a small conversation with an answer of the
    same form."""
    answer, new = request.messages[known - 1], request.messages[known:]
    wanted = [*_small(request, answer, _alike(new)), _small(request, answer, new)[0]]
    *alike, whole = await _renderings(engine, wanted)
    frame = _frame(alike)
    following = frame and frame.following(probe.end_of_turn_ids)
    if following is None or isinstance(alike[0], EngineError) or isinstance(whole, EngineError):
        return Added(None, "the engine does not render what it adds apart from the rest")
    return _added(whole.after(alike[0], less=following), probe)


def _added(ids: Ids | None, probe: EngineProbe) -> Added:
    if ids and ids[0] in probe.end_of_turn_ids:
        return Added(ids)
    return Added(None, "the template does not show what it adds")


def _rendered_answer(previous: Node, closed: Rendering, closing: int) -> Ids | None:
    known = previous.canonical_length or previous.prompt_length
    ends = closed.last(max(0, len(closed) - known + 1))
    return canonical_answer(ends, previous.tail[-1:], closing)


def _with_messages(request: ModelRequest, why: str, finding: str = "") -> Composition:
    return Composition(
        request, "messages", [f"asked with messages: {why}"], [finding] if finding else []
    )


def _may_rewrite(messages: list[Message], known: int) -> bool:
    """Whether templates may leave reasoning out once the messages from `known` on are there."""
    return any(message.get("reasoning_content") for message in messages[:known]) and any(
        message["role"] != "tool" for message in messages[known:]
    )


def _has_media(messages: list[Message]) -> bool:
    return any(
        part.get("type") != "text"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


# What the engine is asked to render


class _Wanted(NamedTuple):
    request: ModelRequest
    closed: bool = False


_Rendered = Rendering | EngineError


async def _renderings(engine: Engine, wanted: Sequence[_Wanted]) -> list[_Rendered]:
    """All of them, asked for at once; an error in place of each that the engine refuses. Raises
    the error where asking again may help."""
    found: dict[int, _Rendered] = {}

    async def render(number: int, each: _Wanted) -> None:
        try:
            found[number] = await engine.render(each.request, closed=each.closed)
        except EngineError as error:
            found[number] = error

    async with anyio.create_task_group() as group:
        for number, each in enumerate(wanted):
            group.start_soon(render, number, each)
    for answer in found.values():
        if isinstance(answer, EngineError) and answer.again:
            raise answer
    return [found[number] for number in range(len(wanted))]


def _first(request: ModelRequest, known: int) -> ModelRequest:
    """The request with its first messages alone."""
    return msgspec.structs.replace(request, messages=request.messages[:known])


def _small(
    request: ModelRequest, answer: Message, new: Sequence[Message] | None = None
) -> list[_Wanted]:
    """Two small conversations that go on with `new` after an answer of the same form as `answer`,
    or end with it and are closed, and differ in its words alone."""
    return [
        _Wanted(
            msgspec.structs.replace(
                request,
                messages=[
                    {"role": "user", "content": "Go on."},
                    _worded(answer, word),
                    *(new or ()),
                ],
                tools=None,
                tool_choice=None,
                response_format=None,
            ),
            closed=new is None,
        )
        for word in ("this", "that")
    ]


def _worded(answer: Message, word: str) -> Message:
    """An answer of the same form in other words: the same calls with another argument. Without
    reasoning, which templates leave out of some turns."""
    worded: Message = {"role": "assistant", "content": answer.get("content") and word}
    if calls := answer.get("tool_calls"):
        arguments = msgspec.json.encode({"word": word}).decode()
        worded["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}} for call in calls
        ]
    else:
        worded["content"] = word
    return worded


def _some_answer(calls: bool) -> Message:
    if not calls:
        return {"role": "assistant", "content": ""}
    function = {"name": "look", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _alike(new: Sequence[Message]) -> list[Message]:
    """Other messages in the same roles as the first new ones: all results of calls, or one."""
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", new))
    return [{**each, "content": "..."} for each in results or [{"role": "user"}]]


def _frame(small: Sequence[_Rendered]) -> Frame | None:
    ids = [each.ids for each in small if not isinstance(each, EngineError)]
    return Frame(*ids) if len(ids) == 2 else None
