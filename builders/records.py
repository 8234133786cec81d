"""What a builder reads and writes: the completions of one session, and the traces made of them.

A completion's prompt is stored as the difference to an earlier one of the session (parent, shared
length, tail), so that a session's memory grows with its new tokens and not with the square of its
turns. `prompt_ids` expands it when somebody asks.
"""

from array import array
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import msgspec

if TYPE_CHECKING:
    Ids: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:  # array takes no parameters at run time before Python 3.12
    Ids = array
    Floats = array


Mode = Literal["messages", "tokens"]
"""How the engine was asked: with messages, which it renders canonically, or with the prompt's ids."""

LogprobKind = Literal["raw", "processed", "unknown"]
"""Log probabilities of the model alone, or of the distribution that was sampled from, after
temperature, top-p, top-k, penalties and bias."""

AttachLevel = Literal[
    "exact",
    "arguments_respelt",
    "default_arguments",
    "reasoning_restored",
    "white_space",
    "half_delivered",
]
"""By how much the echo of an answer differed from it where a request was attached to that answer,
weakest evidence last: not at all; the same JSON in another spelling; arguments with default values
added or dropped; reasoning left out; white space around the text; only what had been delivered of
an answer that was cut off. Of several differences the weakest is named."""


class VersionSpan(msgspec.Struct, kw_only=True, frozen=True):
    """`sampled_ids[start:end]` were sampled under this policy version; None: nobody can say which."""

    version: str | None
    start: int
    end: int


class TensorRef(msgspec.Struct, kw_only=True, frozen=True):
    """Something large that the engine sent beside the tokens, kept in a file of its own."""

    name: str
    """routed_experts, sampling_mask (top-p nucleus ids), or that of a media input."""
    file: str
    """Relative to the journal's folder."""
    bytes: int
    sha256: str
    format: str = "npy"


class TokenNode(msgspec.Struct, kw_only=True, eq=False):
    """The tokens of one call: its prompt as the difference to an earlier one's context, its sample."""

    completion_id: str
    parent: Self | None = None
    """The earlier call against which the prompt is stored; storage, not meaning."""
    shared: int = 0
    """How many leading ids of this prompt are those of the parent's prompt + sampled ids."""
    tail: Ids
    """int32, the prompt's remaining ids."""
    sampled_ids: Ids
    """int32, exactly as the engine reported them, stop token included."""

    @property
    def prompt_length(self) -> int:
        return self.shared + len(self.tail)

    @property
    def prompt_ids(self) -> Ids:
        """The whole prompt, int32; costs a walk up the parents and one copy."""
        return self.prompt_from(0)

    def prompt_from(self, start: int) -> Ids:
        """The prompt's ids from position `start` on; walks up no further than they reach."""
        pieces: list[Ids] = []
        node, end = self, self.prompt_length
        while end > start:
            # Of this node's context the positions from its `shared` on are its own.
            if end > node.shared:
                own = node.tail
                if end > node.prompt_length:
                    own = own + node.sampled_ids[: end - node.prompt_length]
                pieces.append(own[max(start - node.shared, 0) : end - node.shared])
                end = node.shared
            if node.parent is None:
                break
            node = node.parent
        ids: Ids = array("i")
        for piece in reversed(pieces):
            ids += piece
        return ids

    def prompt_after(self, earlier: Self) -> Ids | None:
        """What this prompt adds to that of `earlier`; None when it does not begin with it.

        Costs what is new where `earlier` is one of the calls by which the prompt is stored, else
        two whole prompts.
        """
        known = earlier.prompt_length
        node = self
        while node.parent is not None and node.shared >= known:
            node = node.parent
            if node is earlier:
                return self.prompt_from(known)
        begins = self.prompt_length >= known and self.prompt_ids[:known] == earlier.prompt_ids
        return self.prompt_from(known) if begins else None

    @property
    def context_ids(self) -> Ids:
        """Prompt and sampled ids together: what the policy had seen and said after this call."""
        return self.prompt_ids + self.sampled_ids


class Completion(TokenNode, kw_only=True, eq=False):
    """One captured model call: a node of the session's forest.

    `index` is the order in which the requests arrived; order of arrival, not of completion, is
    what a builder goes by.
    """

    index: int
    previous: "Completion | None" = None
    """The completion whose answer this request continues, found when it arrived: by message
    identity under an identical head (tools, template arguments, tool choice)."""
    attached: AttachLevel | None = None
    """By what the request was recognised as a continuation of `previous`."""
    ambiguous: bool = False
    """Whether it may as well have continued another completion."""
    continued_tokens: int | None = None
    """How many of the previous completion's sampled tokens the request continues, where its answer
    was delivered in part; None: all of them."""
    canonical_ids: Ids | None = None
    """The answer as the engine's template and tokenizer render it, up to and including its end of
    turn, where a later prompt in tokens mode was composed behind it; None: not known."""
    logprobs: Floats | None
    """float32, one for each sampled id, or None when the engine gave none or they did not align."""
    logprob_kind: LogprobKind = "unknown"
    mode: Mode = "messages"
    messages_shared: int = 0
    messages_tail: list[dict[str, Any]]
    """Normalised chat messages of the request, from `messages_shared` on."""
    tools: list[dict[str, Any]] | None = None
    response_message: dict[str, Any]
    """The answer as a chat message: role, content, reasoning_content, tool_calls."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    kind: str = "turn"
    """"turn", or what kind of side call this was ("title", "compaction", ...)."""
    delivered: bool = True
    """False when the harness's connection was gone before the closing event was written."""
    delivered_tokens: int | None = None
    """How many of the sampled tokens were in what was written while the harness was there; None
    when that was the whole answer."""
    dialect: str = ""
    model_requested: str = ""
    model_used: str = ""
    policy_version: str | None = None
    """That of the first sampled token."""
    versions: list[VersionSpan] = []
    """Which policy version sampled which tokens, in order and without gaps, where more than one
    did; empty: all were sampled under `policy_version`."""
    backend: str = ""
    """The name of the backend that sampled it."""
    sampling: dict[str, Any] = {}
    """The sampling parameters that were sent to the engine."""
    asked: dict[str, Any] = {}
    """What else was asked: tool_choice, response_format, template_kwargs; only what was set."""
    usage: dict[str, int] = {}
    started_at: float = 0.0
    """Wall clock, seconds since the epoch, when the request arrived."""
    ended_at: float = 0.0
    notes: list[str] = []
    """What was dropped or changed on the way to the engine."""
    findings: list[str] = []
    """Codes of what makes this completion less than trustworthy ("logprobs_missing", ...)."""
    chain: dict[str, str] = {}
    """Headers by which the harness tells its conversations apart (thread-id, ...)."""
    tensors: list[TensorRef] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole normalised message list of the request."""
        return self.messages_from(0)

    @property
    def message_count(self) -> int:
        return self.messages_shared + len(self.messages_tail)

    def messages_from(self, start: int) -> list[dict[str, Any]]:
        """The request's messages from number `start` on; walks up no further than they reach."""
        pieces: list[list[dict[str, Any]]] = []
        node, end = self, self.message_count
        while end > start:
            if end > node.messages_shared:
                own = [*node.messages_tail, node.response_message]
                pieces.append(
                    own[max(start - node.messages_shared, 0) : end - node.messages_shared]
                )
                end = node.messages_shared
            if node.parent is None:
                break
            node = node.parent
        return [message for piece in reversed(pieces) for message in piece]


class CompletionSession(msgspec.Struct, kw_only=True):
    """All completions of one harness session, in order of arrival."""

    session_id: str
    task_id: str | None = None
    completions: list[Completion] = []
    metadata: dict[str, Any] = {}
    """The task's metadata; group_id, policy_version and rollout_step are echoed on every trace."""
    end_of_turn_ids: list[int] = []
    """The engine's end-of-turn ids, when known."""
    end_of_turn_texts: list[str] = []
    """The text of each of `end_of_turn_ids`, in their order; empty when the engine did not say."""
    findings: list[str] = []
    """Session-wide findings of the capture (a call that broke, a journal cut short)."""


class Span(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of a completion's sampled tokens in a trace: `response_ids[start : start + length]`
    are its first `length` ones. `metadata["spans"]` of a trace lists them, as plain dicts without
    what has its default.
    """

    start: int
    length: int
    completion_id: str
    kind: str
    policy_version: str | None
    """That of the completion's first token."""
    logprob_kind: LogprobKind
    sampling: dict[str, Any]
    finish_reason: str | None
    """The completion's, also where `length` is not all of it."""
    shared: int = 0
    """How many of its leading tokens an earlier trace trains; masked in this one."""
    sampled: int | None = None
    """How many tokens the completion sampled, where `length` is not all of them."""
    versions: list[VersionSpan] = []
    """As `Completion.versions`, counted from the span's first token."""
    mode: Mode = "messages"
    previous: str | None = None
    """The completion that the request continued, in whichever trace it stands."""
    attached: AttachLevel | None = None
    ambiguous: bool = False
    continued_tokens: int | None = None
    delivered: bool = True
    stop_reason: int | str | None = None
    asked: dict[str, Any] = {}
    """tool_choice, response_format, ..., where they are not those that the trace gives."""
    backend: str = ""
    usage: dict[str, int] = {}
    started_at: float = 0.0
    ended_at: float = 0.0
    findings: list[str] = []
    tensors: list[TensorRef] = []


class Trace(msgspec.Struct, kw_only=True):
    """One training sample (paper §3.4, A.4).

    `response_ids`, `loss_mask` and `response_logprobs` have equal lengths; the mask is 1 exactly
    on tokens that the policy sampled; log probabilities are 0.0 where it is 0.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    response_logprobs: list[float] | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}


class Trajectory(msgspec.Struct, kw_only=True):
    """All traces of a session. `status` is COMPLETED, TIMEOUT or ERROR; the main trace is last."""

    status: str = "COMPLETED"
    metadata: dict[str, Any] = {}
    traces: list[Trace] = []
    error: str | None = None
