import io

import pytest

import builders
from builders.base import StrategySpec
from builders.per_request import PerRequest
from builders.records import CompletionSession, Trace, Trajectory
from evaluators.base import Evaluation
from harness_adapters.base import AgentSpec
from polar_gateway import stages
from polar_gateway.errors import BoundaryError
from polar_gateway.protocol import RuntimeSpec, SessionDispatchRequest

WHERE = stages.Paths(
    session="/polar/session",
    home="/polar/session/home",
    artifacts="/polar/session/artifacts",
    logs="/polar/session/logs",
    agent_logs="/polar/session/logs/agent",
    instruction="/polar/session/instruction.md",
    workdir="/polar/session/workspace",
)


def dispatch(**changes: object) -> SessionDispatchRequest:
    given = {
        "session_id": "s1",
        "task_id": "t1",
        "instruction": "x",
        "agent": AgentSpec(harness="codex"),
    }
    return SessionDispatchRequest(**{**given, **changes})  # type: ignore[arg-type]


def test_an_output_log_keeps_the_tail_in_memory_and_the_head_on_disk() -> None:
    file = io.BytesIO()
    log = stages.OutputLog(file, limit=12, tail=10)
    for chunk in (b"abcdef", b"ghijkl", b"mnopqr", b"stuvwxyz"):
        log.write(chunk)
    assert file.getvalue() == b"abcdefghijkl"
    assert log.tail == b"qrstuvwxyz"


def test_a_tasks_variables_are_laid_over_ours() -> None:
    spec = RuntimeSpec(env={"OPENAI_BASE_URL": "http://elsewhere/v1", "EXTRA": "1"})
    env = stages.session_env(dispatch(), spec, WHERE, "http://127.0.0.1:8100", "sk-1")
    assert env["OPENAI_BASE_URL"] == "http://elsewhere/v1"
    assert (env["EXTRA"], env["ANTHROPIC_BASE_URL"]) == ("1", "http://127.0.0.1:8100")


def test_an_evaluator_does_not_see_the_sessions_key() -> None:
    env = stages.grading_env(dispatch(), RuntimeSpec(), WHERE)
    assert not [name for name in env if "KEY" in name or "URL" in name]


def test_withholding_lowers_what_is_positive_and_tells_what_was_given() -> None:
    given = Evaluation(outcome_reward=1.0, trace_rewards=[0.5, None, -1.0])
    assert stages.positive(given)
    held = stages.withheld(given)
    assert (held.outcome_reward, held.trace_rewards) == (0.0, [0.0, None, -1.0])
    assert held.report["withheld"] == {"outcome_reward": 1.0, "trace_rewards": [0.5, None, -1.0]}
    assert not stages.positive(held)


def test_postrun_has_the_budget_of_the_task_or_of_its_evaluator() -> None:
    assert stages.postrun_seconds(dispatch(postrun_timeout_seconds=7.0)) == 7.0
    assert stages.postrun_seconds(dispatch()) == 300.0


class BuilderThatReturnsNonsense(PerRequest):
    name = "nonsense"

    def build(self, session: CompletionSession) -> Trajectory:
        trace = Trace(prompt_ids=[], response_ids=[1], loss_mask=None)  # type: ignore[arg-type]
        return Trajectory(traces=[trace], metadata={"reconstruction_stats": {}})


def test_a_plug_ins_nonsense_is_a_failure_of_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(builders.BUILDERS, "nonsense", BuilderThatReturnsNonsense)
    with pytest.raises(BoundaryError) as caught:
        stages.build(
            dispatch(builder=StrategySpec(strategy="nonsense")), CompletionSession(session_id="s1")
        )
    assert caught.value.failure.boundary == "builder"


def test_what_a_task_is_strict_about_is_its_builders_to_say() -> None:
    config = {"strict": ["budget_cut"]}
    asked = dispatch(builder=StrategySpec(strategy="per_request", config=config))
    assert stages.strict(asked) == ("budget_cut",)
    assert stages.strict(dispatch()) == ()
    assert stages.strict(dispatch(builder=StrategySpec(strategy="nobodys"))) == ()
