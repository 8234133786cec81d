"""What a model call is for: a turn of a conversation, or one of its harness's side calls.

Harnesses ask the model for more than the conversation's next turn: for a title, whether the agent
runs in circles, for a summary that stands for what no longer fits. `RULES` says what such a request
looks like, from recordings of each. A turn must never be taken for a side call, whatever its
instruction, its files or its tools' output say: so every part of a rule must match, no rule rests
on a conversation's text alone, and what matches none is a turn.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from polar_gateway.dialects.turn import ModelRequest

TURN = "turn"

HEAD = 120
"""Characters of a system prompt in which the line must begin that a rule looks for; Claude Code
puts a line that says who it is before."""

FOLDED = "\n\n<system-reminder>"
"""How a system message begins that came in the middle and is now a part of the one before it."""


class Agent(NamedTuple):
    """By what a harness is known."""

    name: str
    """What its `user-agent` header begins with."""
    dialect: str | None = None
    """The only one that it speaks; None: several."""


class Rule(NamedTuple):
    """What a side call looks like; a call must match in every part that is given."""

    kind: str
    agent: Agent
    tools: frozenset[str] | None = frozenset()
    """At least one of these tools is offered and no other; empty: none is; None: any, but some."""
    system: str | None = None
    """What a line at the head of the system prompt begins with; "" is for no system prompt."""
    whole_system: str | None = None
    """All that the system prompt says."""
    first: str = ""
    """What the first message after the system prompt begins with."""
    last: tuple[str, ...] = ()
    """What the last message, then the user's, begins with: one of these."""
    end: tuple[str, ...] = ()
    """What the last message, then the user's, ends with: one of these. A system message that came
    behind it, and was folded into it, is not counted."""
    messages: int | None = None
    """How many there are, the system prompt among them."""
    after_tool: bool = False
    """Whether the last message must follow a tool's result. The user's own words never do."""
    max_tokens: int | None = None
    """The limit of the answer's length."""
    answer: frozenset[str] | None = None
    """The fields of the JSON document that is asked for; None: it may be anything."""
    streamed: bool | None = None
    dropped: str = ""
    """A tool that the provider would run itself, and that was dropped."""
    header: tuple[str, str] | None = None
    """The name of a header, and what it contains."""


_CODEX = Agent("codex", "responses")
_CLAUDE = Agent("claude-cli/", "anthropic")
_GEMINI = Agent("GeminiCLI", "google")
_QWEN = Agent("QwenCode/")
_OPENCODE = Agent("opencode/")
_PI = Agent("pi/")
_PI_OLD = Agent("OpenAI/JS", "chat")

_NEXT_SPEAKER = "Analyze *only* the content and structure of your immediately preceding response ("
_STATE_SNAPSHOT = "Then, produce the <state_snapshot> XML."
_MEMORY_TOOLS = frozenset(
    {"read_file", "grep_search", "glob", "run_shell_command", "write_file", "edit"}
)
_PI_SUMMARY = (
    "You are a context summarization assistant. Your task is to read a conversation between "
)
_PI_HEADS = ("<conversation>\n", "# Conversation\n")
_CLAUDE_ENDS = (
    "Tool calls will be rejected and you will fail the task.",
    # When the first answer had no summary in it.
    "This paragraph is about how to write this summary. The user did not write it.",
)
_PI_ENDS = (
    "Preserve exact file paths, function names, and error messages.",
    "Focus on what's needed to understand the kept suffix.",
    "Do not infer or recreate later messages.",
)

RULES = (
    Rule(
        "compaction",
        _CODEX,
        # Quotes inside the document's strings are escaped, so that no path or name can say this.
        header=("x-codex-turn-metadata", '"request_kind":"compaction"'),
    ),
    *(
        Rule(
            "compaction",
            _CLAUDE,
            tools=None,
            last=("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use ",),
            end=_CLAUDE_ENDS,
            header=header,
            after_tool=header is None,
        )
        # The header is missing where models are named for its roles, as the launch plan does.
        for header in (("anthropic-beta", "fallback-credit-"), None)
    ),
    Rule("quota", _CLAUDE, system="", last=("quota",), messages=1, max_tokens=1, streamed=False),
    Rule(
        "title",
        _CLAUDE,
        system="You are naming a coding session so the user can pick it out of a long list ",
        last=("<session>\n",),
        messages=2,
        answer=frozenset({"title"}),
    ),
    Rule(
        "summary",
        _CLAUDE,
        system="Write a short summary label describing what these tool calls accomplished.",
        end=("\n\nLabel:",),
        messages=2,
    ),
    Rule(
        "summary",
        _CLAUDE,
        whole_system="You are a Claude agent, built on Anthropic's Claude Agent SDK.",
        last=("\nWeb page content:\n---\n",),
        end=("\n - Never produce or reproduce exact song lyrics.\n",),
        messages=2,
    ),
    Rule(
        "web_search",
        _CLAUDE,
        system="You run a web search for another Claude model, which is waiting on the result",
        last=("Perform a web search for the query: ",),
        messages=2,
        dropped="web_search",
    ),
    Rule(
        "loop_check",
        _GEMINI,
        system="You are a diagnostic agent that determines whether a conversational AI assistant ",
        last=("Please analyze the conversation history to determine the possibility that ",),
        answer=frozenset({"unproductive_state_analysis", "unproductive_state_confidence"}),
        streamed=False,
    ),
    Rule(
        "next_speaker",
        _GEMINI,
        system="",
        last=(_NEXT_SPEAKER,),
        answer=frozenset({"reasoning", "next_speaker"}),
        streamed=False,
    ),
    Rule(
        "routing",
        _GEMINI,
        system="You are a specialized Task Routing AI. Your sole function is to analyze ",
        answer=frozenset({"complexity_reasoning", "complexity_score"}),
        streamed=False,
    ),
    Rule(
        "edit_correction",
        _GEMINI,
        system="You are an expert code-editing assistant specializing in debugging and correcting ",
        last=("\n# Goal of the Original Edit\n",),
        messages=2,
        streamed=False,
    ),
    Rule(
        "edit_correction",
        _GEMINI,
        system="You are an expert code-editing assistant. Your task is to analyze a failed edit ",
        last=("Context: An LLM has just generated ",),
        messages=2,
        streamed=False,
    ),
    Rule(
        "web_search",
        _GEMINI,
        system="You are Gemini CLI, ",
        messages=2,
        streamed=False,
        dropped="googleSearch",
    ),
    Rule(
        "compaction",
        _GEMINI,
        system="You are a specialized system component responsible for distilling chat history ",
        end=(
            "Then, generate the updated <state_snapshot>.",
            "Otherwise, repeat the exact same <state_snapshot> again.",
        ),
        streamed=False,
    ),
    Rule(
        "next_speaker",
        _QWEN,
        tools=frozenset({"respond_in_schema"}),
        system="",
        last=(_NEXT_SPEAKER,),
        streamed=False,
    ),
    Rule(
        "memory",
        _QWEN,
        tools=_MEMORY_TOOLS,
        system="You are now acting as the managed memory extraction subagent for an AI coding ",
    ),
    Rule(
        "summary",
        _QWEN,
        system="Extract and summarize the requested information from the provided web content.",
        last=("The user requested the following: ",),
        messages=2,
    ),
    Rule(
        "compaction",
        _QWEN,
        tools=None,
        last=("You are the component that summarizes a conversation when its context window ",),
        end=(_STATE_SNAPSHOT,),
        after_tool=True,
    ),
    Rule(
        "compaction",
        _QWEN,
        system="You are the component that summarizes a conversation when its context window ",
        last=("First, reason in your <analysis> block. " + _STATE_SNAPSHOT,),
    ),
    Rule(
        "title",
        _OPENCODE,
        system="You are a title generator. You output ONLY ",
        first="Generate a title for this conversation:\n",
    ),
    Rule(
        "compaction",
        _OPENCODE,
        system="You are a context summarization agent. You are given a conversation between ",
        end=("Do not mention the summary process or that context was compacted.",),
        messages=2,
    ),
    *(
        Rule("compaction", agent, system=_PI_SUMMARY, last=_PI_HEADS, end=_PI_ENDS, messages=2)
        for agent in (_PI, _PI_OLD)
    ),
)


def classify(request: ModelRequest, dialect: str, headers: Mapping[str, str]) -> str:
    """The kind of a call: "turn", or the side call's. Header names are lower-case.

    What the endpoint says a call is for (`request.kind`) goes before any rule.
    """
    if request.kind != TURN:
        return request.kind
    name = headers.get("user-agent", "")
    for rule in RULES:
        if not name.startswith(rule.agent.name) or rule.agent.dialect not in (None, dialect):
            continue
        if _matches(rule, request, headers):
            return rule.kind
    return TURN


def _matches(rule: Rule, request: ModelRequest, headers: Mapping[str, str]) -> bool:
    """Whether every part of a rule matches, the cheap parts first."""
    messages = request.messages
    if not messages or not _offers(rule, request):
        return False
    if rule.messages is not None and len(messages) != rule.messages:
        return False
    if rule.streamed is not None and request.stream != rule.streamed:
        return False
    if rule.max_tokens is not None and request.max_tokens != rule.max_tokens:
        return False
    if rule.header is not None and rule.header[1] not in headers.get(rule.header[0], ""):
        return False
    if rule.answer is not None and rule.answer != _asked_fields(request):
        return False
    if rule.dropped and not any(note.startswith(f"tool {rule.dropped} ") for note in request.notes):
        return False
    if rule.after_tool and (len(messages) < 2 or messages[-2]["role"] != "tool"):
        return False
    return _says(rule, messages)


def _offers(rule: Rule, request: ModelRequest) -> bool:
    offered = request.tools or []
    if rule.tools is None or not rule.tools:
        return bool(offered) == (rule.tools is None)
    return bool(offered) and all(_name(tool) in rule.tools for tool in offered)


def _says(rule: Rule, messages: list[dict[str, Any]]) -> bool:
    has_system = messages[0]["role"] == "system"
    system = _text(messages[0]) if has_system else ""
    if rule.system is not None and not _opens(system, rule.system):
        return False
    if rule.whole_system is not None and system != rule.whole_system:
        return False
    if rule.first:
        first = messages[1:2] if has_system else messages[:1]
        if not first or not _text(first[0]).startswith(rule.first):
            return False
    if not (rule.last or rule.end):
        return True
    if messages[-1]["role"] != "user":
        return False
    last = _text(messages[-1])
    if rule.last and not last.startswith(rule.last):
        return False
    return not rule.end or last.endswith(rule.end) or last.partition(FOLDED)[0].endswith(rule.end)


def _opens(system: str, line: str) -> bool:
    if not line:
        return not system
    return system.startswith(line) or system.find(f"\n{line}", 0, HEAD + len(line)) >= 0


def _asked_fields(request: ModelRequest) -> frozenset[str]:
    schema = ((request.response_format or {}).get("json_schema") or {}).get("schema") or {}
    return frozenset(schema.get("properties") or ())


def _name(tool: dict[str, Any]) -> str:
    return str((tool.get("function") or {}).get("name"))


def _text(message: dict[str, Any]) -> str:
    """A message's text; none of one with pictures, which no side call that is known has."""
    content = message.get("content")
    return content if isinstance(content, str) else ""
