"""One run of one unmodified CLI as a session of a gateway, whose engine says what a script says."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from builders.records import Completion, Trace
from harness_adapters import npm
from polar_gateway.capture.reading import read_session
from polar_gateway.config import ModelCallConfig
from polar_gateway.protocol import SessionResult
from polar_gateway.testing.engine import Call, Fault, ScriptedEngine
from polar_gateway.testing.script import Line, Rule, Script, ScriptedCall, Spelling, Step
from tests.live.wire import GATEWAY_HOST, Cut, Wire, wire
from tests.polar_gateway.gateway import gateway, turns
from tests.requirements import require


class Cli(NamedTuple):
    """What a script must know of a harness."""

    shell: str
    """Its tool that runs a command."""
    command: str = "command"
    """That tool's argument."""
    more: dict[str, Any] = {}
    """Arguments without which the tool refuses."""


CLIS = {
    "codex": Cli("exec_command", "cmd"),
    "claude_code": Cli("Bash"),
    "pi": Cli("bash"),
    "pi_old": Cli("bash"),
    "gemini_cli": Cli("run_shell_command"),
    "qwen_code": Cli("run_shell_command", more={"is_background": False}),
    "opencode": Cli("bash"),
}


def run(harness: str, command: str) -> ScriptedCall:
    """The call by which a harness runs a command."""
    cli = CLIS[harness]
    return ScriptedCall(name=cli.shell, arguments={cli.command: command, **cli.more})


def turn(harness: str, *commands: str, think: str = "Well.", say: str = "") -> Step:
    return Step(think=think, say=say, calls=[run(harness, command) for command in commands])


def rule(match: str | list[str], *steps: Step | str, tokens: Spelling = "random") -> Rule:
    return Rule(match=match, steps=list(steps), tokens=tokens)


def planting(harness: str) -> Rule:
    """Three turns, of which the first two plant a bean each."""
    return rule(
        "Plant beans",
        turn(harness, "echo one > beans.txt"),
        turn(harness, "echo two >> beans.txt"),
        turn(harness, say="Planted."),
    )


def planting_slowly(harness: str) -> list[Rule]:
    """The same with much to say in the second turn; whoever asks for the rest of it gets no more."""
    told = Step(
        think="Now.",
        say="I tell it slowly, row after row, and then go on.",
        calls=[run(harness, "echo two >> beans.txt")],
    )
    return [
        rule(
            ["Plant beans", "cut off mid-stream|<previous_response_suffix>"],
            turn(harness, say="That was all."),
        ),
        rule(
            "Plant beans",
            turn(harness, "echo one > beans.txt"),
            told,
            turn(harness, say="Planted."),
            tokens="canonical",
        ),
    ]


class Quoting(Script, frozen=True):
    """A script whose lines may quote the prompt: `$[expression]` is the last thing found by it."""

    def line(self, prompt: str) -> Line:
        line = super().line(prompt)

        def found(quote: re.Match[str]) -> str:
            seen = re.findall(quote[1], prompt)
            return str(seen[-1]) if seen else ""

        return line._replace(text=re.sub(r"\$\[(.*?)\]\$", found, line.text))


class Ran(NamedTuple):
    """How it went, as everyone saw it."""

    result: SessionResult
    completions: list[Completion]
    """What the gateway recorded."""
    calls: list[Call]
    """What the engine was asked, without the gateway's own start-up question."""
    wire: Wire
    workdir: Path
    stdout: str
    stderr: str

    @property
    def sampled(self) -> list[Call]:
        """The calls for which the engine sampled anything."""
        return [call for call in self.calls if call.sent_tokens]

    @property
    def how(self) -> str:
        """For messages of assertions."""
        return f"{self.workdir}: {self.result.error}\n{self.stdout[-3000:]}\n{self.stderr[-2000:]}"


async def live(
    folder: Path,
    harness: str,
    *rules: Rule,
    instruction: str,
    faults: Sequence[Fault] = (),
    cuts: tuple[Cut, ...] = (),
    token_delay: float = 0.0,
    max_model_len: int = 131_072,
    model_calls: ModelCallConfig | None = None,
    within: float = 75,
    agent: dict[str, Any] | None = None,
    **changes: Any,
) -> Ran:
    """Run it to its end. `faults` count from the harness's first call on."""
    require("clis", harness in _installed(), f"run: polar harness install {harness}")
    engine = ScriptedEngine(
        Quoting(rules=list(rules)), max_model_len=max_model_len, token_delay=token_delay
    )
    workdir = folder / "work"
    workdir.mkdir(parents=True)
    async with (
        wire(cuts) as between,
        gateway(
            folder / "node",
            engine=engine,
            model_host=GATEWAY_HOST,
            model_port=between.port,
            model_calls=model_calls or ModelCallConfig(),
        ) as node,
    ):
        engine.faults = list(faults)
        result = await node.run(
            within=within + 30,
            instruction=instruction,
            agent={"harness": harness, "model_name": "stub-model", **(agent or {})},
            runtime={"backend": "local", "workdir": str(workdir), "allow_internet": True},
            remaining_timeout_seconds=within,
            **changes,
        )
        attempt = folder / "node" / "attempts" / "att-s1"
        return Ran(
            result=result,
            completions=read_session(attempt / "session.journal").completions,
            calls=turns(engine),
            wire=between,
            workdir=workdir,
            stdout=(attempt / "artifacts" / "agent.stdout.log").read_text(errors="replace"),
            stderr=(attempt / "artifacts" / "agent.stderr.log").read_text(errors="replace"),
        )


def _installed() -> set[str]:
    return {pack.name for pack in npm.installed(npm.default_cache())}


def assert_completed(ran: Ran) -> None:
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None), ran.how


def assert_recorded(ran: Ran) -> None:
    """Whatever the engine sampled is in the record under its own ids, and nothing else is."""
    recorded = {f"chatcmpl-{one.completion_id}": one for one in ran.completions}
    sampled = {call.request_id: call for call in ran.sampled}
    assert recorded.keys() == sampled.keys(), ran.how
    for request_id, completion in recorded.items():
        call = sampled[request_id]
        assert completion.prompt_ids.tolist() == call.prompt_token_ids
        count = len(completion.sampled_ids)
        assert count == call.sent_tokens or not completion.delivered
        assert completion.sampled_ids.tolist() == call.token_ids[:count]
        assert completion.logprobs is not None
        assert completion.logprobs.tolist() == pytest.approx(call.logprobs[:count])


def assert_extends(later: Call, earlier: Call) -> None:
    """The later prompt begins with the earlier one and what was sampled for it."""
    context = earlier.prompt_token_ids + earlier.token_ids
    assert later.prompt_token_ids[: len(context)] == context


def assert_one_chain(ran: Ran) -> Trace:
    """The session is one trace, in which all that was sampled is trainable."""
    assert ran.result.trajectory is not None
    (trace,) = ran.result.trajectory.traces
    assert sum(trace.loss_mask) == sum(len(call.token_ids) for call in ran.calls)
    return trace


def assert_sampled_once(ran: Ran) -> None:
    """No turn was sampled a second time."""
    prompts = [tuple(call.prompt_token_ids) for call in ran.sampled]
    assert len(set(prompts)) == len(prompts), ran.how
