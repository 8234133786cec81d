"""The registry of findings: every reason why a session's tokens or its reward may not be what they
seem, how bad it is, and what to do about it.

Codes are stable: trainers and dashboards go by them. Where one is found is said nowhere here; that
no code is found that does not stand here is for a test to say.
"""

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import msgspec

from builders.records import Completion

Level = Literal["note", "warning", "fatal"]
"""note: for people who wonder. warning: the tokens are what was sampled, in the context that the
trace gives, but a trainer should know this about them. fatal: that cannot be vouched for, so what
the finding is about is never trained on."""

Scope = Literal["completion", "session"]
"""What a finding is about, and so what is left out when it is fatal: one model call, or all."""


class Code(NamedTuple):
    level: Level
    scope: Scope
    meaning: str
    """One sentence."""
    action: str
    """What to do about it, one sentence."""
    cuts: bool = False
    """Whether something that was sampled is lost with it, so that what is left of the session is at
    best a prefix of it. Every fatal finding of a completion cuts, too."""


class Found(msgspec.Struct, frozen=True):
    """One finding, with the numbers it was judged by."""

    code: str
    numbers: dict[str, float] = {}
    """Counts, which may be summed over completions; shares are for whoever knows the whole."""


_REPAIR_ENGINE = "See what the engine's start-up report says of ids and log probabilities."
_PIN_VERSION = "Report it with the engine's version; use another version of the engine until then."

REGISTRY: dict[str, Code] = {
    # Ids
    "ids_missing": Code(
        "fatal",
        "completion",
        "The engine did not say which tokens it sampled.",
        _REPAIR_ENGINE,
    ),
    "prompt_ids_missing": Code(
        "fatal",
        "completion",
        "The engine did not say which tokens it read as the prompt.",
        _REPAIR_ENGINE,
    ),
    "ids_usage_mismatch": Code(
        "fatal",
        "completion",
        "The engine counts other numbers of tokens than it gave ids of.",
        "Ask for whole answers instead of streams: parsers of some versions drop ids of streams.",
    ),
    "token_in_ignored": Code(
        "warning",
        "completion",
        "The engine was sent the prompt as ids and said that it had read others; it was asked again "
        "with messages, with which the branch goes on.",
        "Look for images in the messages or a KV connector of the engine; set prompts: messages "
        "where it happens often.",
    ),
    # Log probabilities
    "logprobs_missing": Code(
        "fatal",
        "completion",
        "The engine gave no log probabilities.",
        _REPAIR_ENGINE,
    ),
    "logprobs_null": Code(
        "fatal",
        "completion",
        "The engine gave null where a log probability belongs.",
        _PIN_VERSION,
    ),
    "logprobs_misaligned": Code(
        "fatal",
        "completion",
        "There are more or fewer log probabilities than sampled tokens.",
        _PIN_VERSION,
    ),
    "logprobs_non_finite": Code(
        "fatal",
        "completion",
        "A log probability is infinite or not a number.",
        "Look for overflow in the model's weights or in its low-precision layers.",
    ),
    "logprobs_positive": Code(
        "fatal",
        "completion",
        "A log probability is greater than zero, which no probability has.",
        _PIN_VERSION,
    ),
    "logprobs_minus_infinity": Code(
        "fatal",
        "completion",
        "A sampled token has the log probability -9999, by which engines mean that it was impossible.",
        "Look for a logit bias or a grammar that the log probabilities leave out.",
    ),
    "logprob_not_behaviour": Code(
        "warning",
        "completion",
        "The log probabilities are those of the model alone, or nobody knows which, while "
        "temperature, top-p, top-k, min-p, a penalty or a bias changed what was sampled from.",
        "Start the engine with processed log probabilities, or set the task's sampling to "
        "temperature 1, top_p 1 and top_k -1, or let the trainer recompute them.",
    ),
    # Answers and their delivery
    "undelivered": Code(
        "warning",
        "completion",
        "The harness did not receive this answer, or not all of it.",
        "Nothing if it is rare, since it is not trained on; else compare the harness's time limits "
        "with the engine's latency.",
    ),
    "duplicated": Code(
        "note",
        "session",
        "The same prompt was sampled again after an answer had been delivered; each answer is a "
        "sample of its own.",
        "Nothing if the harness wants several samples; else see why it repeats itself.",
    ),
    "ambiguous_attachment": Code(
        "warning",
        "completion",
        "The request may as well have continued another call, and nothing told which.",
        "Nothing for the tokens, which are checked; do not read the branches as the agent's tree.",
    ),
    "budget_cut": Code(
        "warning",
        "completion",
        "The answer ended at its token limit, not where the policy would have ended it.",
        "Raise sampling.max_tokens or mask overlong answers, as your trainer has it.",
    ),
    "aborted": Code(
        "warning",
        "completion",
        "The engine broke the answer off, as engines do when weights are updated, and said what it "
        "had of it.",
        "Pause with mode wait or keep for updates, or use an engine that resumes what it aborted.",
    ),
    "engine_broke_off": Code(
        "warning",
        "completion",
        "The engine failed in the middle of the answer.",
        "See the engine's log at that time.",
    ),
    "call_failed": Code(
        "warning",
        "completion",
        "The engine gave no answer to a call, however often it was asked.",
        "See the failure's text and the engine's log at that time.",
    ),
    "call_abandoned": Code(
        "note",
        "completion",
        "The harness went away while the answer was being sampled, and did not come back for it.",
        "Nothing: it is not trained on.",
    ),
    "call_cut_by_seal": Code(
        "note",
        "completion",
        "The answer was being sampled when the session ended.",
        "Raise timeout_seconds if agents often end this way.",
    ),
    "call_unfinished": Code(
        "warning",
        "completion",
        "The node stopped while the answer was being sampled; what the journal holds of it is kept.",
        "See why the node stopped.",
    ),
    "gateway_failed": Code(
        "warning",
        "completion",
        "The gateway itself failed at a call.",
        "Report it with the node's log, which has the traceback.",
    ),
    # What the policy saw
    "history_rewritten": Code(
        "note",
        "completion",
        "The chat template leaves out what it had rendered before (earlier reasoning, for one), so "
        "that the call began a branch.",
        "Set history: keep to go on from the recorded tokens, if the policy shall see them.",
    ),
    "history_kept": Code(
        "note",
        "completion",
        "The prompt goes on from the recorded tokens although the chat template would have left "
        "some out.",
        "Nothing: history: keep asks for it.",
    ),
    "context_drift": Code(
        "warning",
        "session",
        "A merged trace shows the policy's own tokens where its prompt had another spelling of them.",
        "Ask with prompts: tokens where the engine can, or split there with split_on_drift.",
    ),
    "one_turn_traces": Code(
        "warning",
        "session",
        "Many calls continue one another and none could be merged: the chat template renders an "
        "answer otherwise than it was sampled.",
        "Ask with prompts: tokens, or use a template that keeps what was sampled.",
    ),
    "end_of_turn_unknown": Code(
        "warning",
        "session",
        "Nobody knows which ids end a turn, so that traces merge only where nothing is left to decide.",
        "Set the builder's end_of_turn_ids, or use an engine that tells.",
    ),
    # Policy versions
    "mixed_policy_versions": Code(
        "warning",
        "session",
        "More than one policy version sampled the session's tokens.",
        "Correct by the versions that the spans give, or bound the age of what you train on.",
    ),
    "policy_version_unknown": Code(
        "warning",
        "completion",
        "The weights changed in the middle of the answer and nobody can say at which token.",
        "Use an engine that reports weight versions, or pause with mode wait for updates.",
    ),
    # The session as a whole
    "no_completions": Code(
        "fatal",
        "session",
        "No model call was captured.",
        "See the harness's log: it did not start, did not ask, or asked another endpoint.",
    ),
    "tail_lost": Code(
        "warning",
        "session",
        "The last answer of a conversation was cut off and never sampled again; all before it is "
        "whole.",
        "Train on what is there, or leave the session out where your algorithm needs whole ones.",
        cuts=True,
    ),
    "abort_in_chain": Code(
        "warning",
        "session",
        "An answer that was broken off was taken for whole, and the conversation went on from it.",
        "The tokens are true; leave the session out if a turn without its end is not to be learnt.",
    ),
    "journal_cut_short": Code(
        "warning",
        "session",
        "The journal's last record is half-written: the node stopped at that moment.",
        "Nothing: what came before is whole, since each record carries a checksum.",
        cuts=True,
    ),
    "journal_damaged": Code(
        "warning",
        "session",
        "A record of the journal is damaged; it and what follows are not used.",
        "Check the node's disk.",
        cuts=True,
    ),
    "journal_failed": Code(
        "warning",
        "session",
        "The journal could not be written, so that the session was ended there.",
        "See to it that the node's disk has room and is writable.",
        cuts=True,
    ),
    "left_out": Code(
        "note",
        "session",
        "Some sampled tokens are not trained on; the numbers give the tokens by reason.",
        "Nothing, or change the builder's kinds, strict or max_tokens.",
    ),
    "trace_cut": Code(
        "warning",
        "session",
        "A trace was longer than the builder's max_tokens and ends there.",
        "Raise max_tokens if the trainer has room, or treat the session as truncated.",
        cuts=True,
    ),
    "side_call_share": Code(
        "warning",
        "session",
        "Most of the session's calls are side calls (titles, checks), which are not trained on.",
        "See whether turns of the agent are taken for side calls; the builder's kinds can add them.",
    ),
    "calls_not_parsed": Code(
        "warning",
        "session",
        "Answers hold what looks like tool calls, and the engine never made a call of any.",
        "Set the engine's tool parser to the model's own.",
    ),
    "tools_never_called": Code(
        "warning",
        "session",
        "Tools were offered in many turns and none was ever called.",
        "See whether the model was taught these tools and the engine's tool parser fits it.",
    ),
    "harness_crash": Code(
        "warning",
        "session",
        "The harness ended with an error.",
        "See agent.stderr.log among the artifacts; the tokens until then are true.",
    ),
    "context_overflow": Code(
        "warning",
        "session",
        "A prompt was longer than the model's context and nothing was said after it.",
        "Train on it as truncated, or raise the engine's maximum length.",
    ),
    "cut_off": Code(
        "warning",
        "session",
        "The node stopped in mid-session; this is what its journal holds.",
        "Nothing: another attempt is made where one is left.",
        cuts=True,
    ),
    "not_rebuilt": Code(
        "fatal",
        "session",
        "The journal of a session that was cut off could not be made into traces.",
        "Run polar journal verify on the file, which is among the artifacts.",
    ),
    # Places and rewards
    "unisolated": Code(
        "warning",
        "session",
        "The runtime isolates nothing: the agent ran beside the node's own processes.",
        "Use docker or apptainer for agents that are not trusted.",
    ),
    "runtime": Code(
        "note",
        "session",
        "The runtime changed something that the task asked for, or could not grant it.",
        "Read the message.",
    ),
    "processes_not_stopped": Code(
        "warning",
        "session",
        "Processes of the agent may have run on while its work was graded.",
        "Use refresh_runtime, which grades in a place that the agent never touched.",
    ),
    "graded_in_agent_runtime": Code(
        "note",
        "session",
        "The agent's own runtime was graded.",
        "Use refresh_runtime where an agent might tamper with what grades it.",
    ),
    "reward_withheld": Code(
        "warning",
        "session",
        "The evaluator rewarded a session that failed; positive rewards were lowered to 0.",
        "Read the evaluator's report, which has what was given.",
    ),
    "native_log_lost": Code(
        "note",
        "session",
        "A log file of the harness could not be kept.",
        "Nothing for the tokens; the message has the reason.",
    ),
}

DISQUALIFYING = frozenset(
    code for code, one in REGISTRY.items() if one.level == "fatal" and one.scope == "completion"
)
"""The findings under which a completion is never trained on."""

NO_PROBABILITY = -9999.0
"""What vLLM writes for minus infinity: no sampled token can have it."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
}
"""Sampling parameters that change what is sampled from, and the values at which they do not."""


def level(code: str, strict: Collection[str] = ()) -> Level:
    """How bad a finding is to someone who has `strict` codes count as fatal."""
    if code in strict:
        return "fatal"
    return REGISTRY[code].level if code in REGISTRY else "warning"


def disqualifying(completion: Completion, strict: Collection[str] = ()) -> str | None:
    """The first finding under which the completion is not trained on; None if it may be."""
    return next(
        (one.code for one in of(completion) if one.code in DISQUALIFYING or one.code in strict),
        None,
    )


def of(completion: Completion) -> list[Found]:
    """What is to be known of one completion: what its capture found, then what its record shows."""
    found = {code: Found(code) for code in completion.findings}
    for one in _shown(completion):
        found.setdefault(one.code, one)
    return list(found.values())


def _shown(completion: Completion) -> Iterator[Found]:
    """What the record shows by itself."""
    if not completion.sampled_ids:
        yield Found("ids_missing")
    if not completion.prompt_length:
        yield Found("prompt_ids_missing")
    said = any(code.startswith("logprobs_") for code in completion.findings)
    if completion.sampled_ids and not said:
        yield from _of_logprobs(completion)
    if not_behaviour(completion):
        yield Found("logprob_not_behaviour")
    if not completion.delivered:
        yield Found("undelivered", {"delivered_tokens": completion.delivered_tokens or 0})
    if completion.ambiguous:
        yield Found("ambiguous_attachment")
    if completion.finish_reason == "length":
        yield Found("budget_cut")
    if completion.finish_reason == "abort":
        yield Found("aborted")
    unknown = sum(span.end - span.start for span in completion.versions if span.version is None)
    if unknown:
        yield Found("policy_version_unknown", {"unknown_tokens": unknown})


def not_behaviour(completion: Completion) -> bool:
    """Whether the recorded log probabilities may be others than those of what was sampled from."""
    if completion.logprob_kind == "processed" or not completion.logprobs:
        return False
    given = completion.sampling
    return any(
        given.get(name) is not None and given[name] not in neutral
        for name, neutral in NEUTRAL.items()
    )


def _of_logprobs(completion: Completion) -> list[Found]:
    logprobs, sampled = completion.logprobs, len(completion.sampled_ids)
    if logprobs is None:
        return [Found("logprobs_missing")]
    if len(logprobs) != sampled:
        return [Found("logprobs_misaligned", {"values": len(logprobs)})]
    # NaN and infinities survive a sum (float32 values cannot overflow a float64), so the comparisons
    # after it, which NaN would slip through, see finite numbers only.
    if math.isfinite(sum(logprobs)) and max(logprobs) <= 0.0 and min(logprobs) > NO_PROBABILITY:
        return []
    counts = {
        "logprobs_non_finite": sum(not math.isfinite(value) for value in logprobs),
        "logprobs_positive": sum(0.0 < value < math.inf for value in logprobs),
        "logprobs_minus_infinity": sum(-math.inf < value <= NO_PROBABILITY for value in logprobs),
    }
    return [Found(code, {"values": count}) for code, count in counts.items() if count]
