from typing import Any

import msgspec
import pytest

from polar_gateway.errors import Failure
from polar_gateway.protocol import NodeOffers
from polar_server import tasks
from polar_server.errors import RefusalError
from polar_server.protocol import Problem, TaskRequest
from tests.polar_server.world import task


def check(document: object, *offers: NodeOffers) -> tasks.CheckedTask:
    return tasks.check_task(msgspec.json.encode(document), offers)


def refusal(document: object, *offers: NodeOffers) -> Problem:
    with pytest.raises(RefusalError) as caught:
        check(document, *offers)
    return caught.value.problem


PAPER_TASK = task(
    num_samples=8,
    timeout_seconds=1800,
    runtime={
        "backend": "docker",
        "image": "swebench/sweb.eval.x86_64.astropy",
        "prepare": [{"type": "exec", "command": "npm i -g @openai/codex"}],
    },
    agent={"harness": "codex", "model_name": "qwen"},
    builder={"strategy": "prefix_merging"},
    evaluator={
        "strategy": "test_on_output",
        "config": {"test_command": "pytest -q", "expected": {"test_it": "PASSED"}},
    },
    callback_url="http://127.0.0.1:9000/callback/task_result",
    metadata={"group_id": "g1", "policy_version": 3, "rollout_step": 7},
)


def test_the_papers_own_task_is_accepted():
    checked = check(PAPER_TASK)
    assert checked.request.num_samples == 8
    assert checked.needs.runtime == "docker"
    assert checked.needs.evaluator == "test_on_output"


def agent(**fields: Any) -> dict[str, Any]:
    return task(agent=fields)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        pytest.param([], None, id="not an object"),
        pytest.param({k: v for k, v in task().items() if k != "task_id"}, "task_id", id="missing"),
        pytest.param(task(num_sample=3), "num_sample", id="misspelt"),
        pytest.param(task(task_id="../etc"), "task_id", id="id that is a path"),
        pytest.param(task(task_id="a\n"), "task_id", id="id with a newline"),
        pytest.param(task(num_samples=0), "num_samples", id="no samples"),
        pytest.param(task(num_samples="3"), "num_samples", id="number as text"),
        pytest.param(task(timeout_seconds=0), "timeout_seconds", id="no time"),
        pytest.param(agent(harness="codex", foo=1), "agent.foo", id="unknown nested field"),
        pytest.param(agent(harness="codex", import_path="a:B"), "agent", id="two agents"),
        pytest.param(agent(import_path="evil:Agent"), "agent.import_path", id="module as agent"),
        pytest.param(agent(harness="evil:Agent"), "agent.harness", id="module as harness"),
        pytest.param(agent(harness="emacs"), "agent.harness", id="unknown harness"),
        pytest.param(
            agent(harness="codex", settings={"reasoning_efort": "low"}),
            "agent.settings.reasoning_efort",
            id="misspelt setting",
        ),
        pytest.param(agent(harness="shell"), "agent", id="shell without a command"),
        pytest.param(
            agent(harness="pi_old", mcp_servers=[{"name": "m", "command": "x"}]),
            "agent.mcp_servers",
            id="what a harness cannot do",
        ),
        pytest.param(
            agent(harness="codex", env={"A": 1}), "agent.env[...]", id="environment that is not text"
        ),
        pytest.param(
            task(runtime={"prepare": [{"type": "exec", "command": "a"}, {"type": "exec"}]}),
            "runtime.prepare[1]",
            id="second action without a command",
        ),
        pytest.param(task(runtime={"cpus": 0}), "runtime.cpus", id="no cpu"),
        pytest.param(task(runtime={"import_path": "a:B"}), "runtime.import_path", id="module as runtime"),
        pytest.param(task(builder={"strategy": "best"}), "builder.strategy", id="unknown builder"),
        pytest.param(task(builder={"strategy": "a.b:C"}), "builder.strategy", id="module as builder"),
        pytest.param(
            task(builder={"strategy": "per_request", "config": {"x": 1}}),
            "builder.config.x",
            id="unknown builder option",
        ),
        pytest.param(
            task(evaluator={"strategy": "luck"}), "evaluator.strategy", id="unknown evaluator"
        ),
        pytest.param(
            task(evaluator={"strategy": "test_on_output", "config": {"nope": 1}}),
            "evaluator.config.nope",
            id="unknown evaluator option",
        ),
        pytest.param(task(callback_url="ftp://x/y"), "callback_url", id="callback that is not http"),
        pytest.param(task(callback_url="http://[::1"), "callback_url", id="callback that is no URL"),
        *(
            pytest.param(task(callback_url=url), "callback_url", id=f"callback that no host has: {url[:20]}")
            for url in ("http://a..b/", "http://.example.com/", f"http://{'a' * 64}.b/", "http://a:port/")
        ),
        pytest.param(task(runtime={"backend": "docker"}), "runtime.image", id="docker without an image"),
        pytest.param(
            task(runtime={"image": "x", "network": "bogus"}), "runtime.network", id="unknown network"
        ),
        pytest.param(
            task(runtime={"backend": "local", "allow_internet": False}),
            "runtime.allow_internet",
            id="local without the internet",
        ),
        pytest.param(
            task(runtime={"backend": "local", "network": "none"}),
            "runtime.network",
            id="local without a network",
        ),
        pytest.param(
            task(runtime={"image": "x", "env": {"A=B": "x"}}), "runtime", id="impossible variable"
        ),
        pytest.param(
            task(runtime={"image": "x", "prepare": [{"type": "exec", "command": "x", "env": {"A": "\0"}}]}),
            "runtime.prepare[0]",
            id="impossible value",
        ),
        pytest.param(agent(harness="codex", env={"A=B": "x"}), "agent.env", id="agent's impossible variable"),
        pytest.param(task(sampling={"top_p": 2}), "sampling.top_p", id="impossible sampling"),
        pytest.param(task(prompting={"history": "drop"}), "prompting.history", id="no such history"),
    ],
)
def test_a_bad_task_is_refused_naming_the_field(document: object, field: str | None):
    problem = refusal(document)
    assert (problem.status, problem.field) == (422, field)
    assert problem.detail


def test_a_bad_agent_timeout_is_named():
    problem = refusal(task(metadata={"agent_timeout": -1}))
    assert problem.status == 422
    assert "metadata.agent_timeout" in problem.detail


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"task_id": NaN}', b'{"metadata": {"a": ' + b"[" * 5000])
def test_what_is_not_json_is_malformed(body: bytes):
    with pytest.raises(RefusalError) as caught:
        tasks.check_task(body, [])
    assert caught.value.problem.status == 400


def test_a_name_that_only_a_node_knows_is_accepted_when_the_node_offers_it():
    offers = NodeOffers(harnesses=["emacs"], builders=["best"])
    checked = check(task(agent={"harness": "emacs", "settings": {"any": 1}}, builder={"strategy": "best"}), offers)
    assert checked.needs.harness == "emacs"


def test_a_name_that_no_live_node_offers_is_refused_with_what_they_do_offer():
    offers = [NodeOffers(runtimes=["local"], harnesses=["codex", "pi"]), NodeOffers(runtimes=["docker"])]
    check(task(runtime={"backend": "docker", "image": "x"}), *offers)
    problem = refusal(task(runtime={"backend": "apptainer"}), *offers)
    assert problem.field == "runtime.backend"
    assert problem.detail == "no live node offers 'apptainer'; offered: docker, local"
    assert refusal(agent(harness="claude_code"), *offers).field == "agent.harness"


def test_a_runtime_of_another_backend_is_its_nodes_business():
    offers = NodeOffers(runtimes=["cloud"])
    check(task(runtime={"backend": "cloud", "network": "vpc-7", "allow_internet": False}), offers)


def test_equal_tasks_have_equal_bytes_however_they_are_written():
    short = b'{"agent": {"harness": "codex"}, "task_id": "a", "instruction": "x", "metadata": {"b": 1, "a": 2}}'
    long = (
        b'{"metadata":{"a":2,"b":1},"instruction":"x","task_id":"a","num_samples":1,'
        b'"timeout_seconds":600,"builder":{"strategy":"per_request"},"agent":{"harness":"codex"}}'
    )
    assert tasks.check_task(short, []).canonical == tasks.check_task(long, []).canonical
    other = long.replace(b'"num_samples":1', b'"num_samples":2')
    assert tasks.check_task(short, []).canonical != tasks.check_task(other, []).canonical


@pytest.mark.parametrize("bad", ["..", "a/b", "", "a\n"])
def test_an_id_in_a_path_that_nothing_can_have_is_not_found(bad: str):
    with pytest.raises(RefusalError) as caught:
        tasks.check_id("task", bad)
    assert caught.value.problem.status == 404


def test_a_dispatch_carries_everything_of_the_task():
    said = {"sampling": {"temperature": 0.7}, "prompting": {"history": "keep"}}
    request = msgspec.convert({**PAPER_TASK, **said}, TaskRequest)
    dispatch = tasks.dispatch_request(
        request, session_id="ses-1", attempt_id="att-1", callback_url="http://s/cb"
    )
    assert (dispatch.session_id, dispatch.attempt_id, dispatch.callback_url) == (
        "ses-1",
        "att-1",
        "http://s/cb",
    )
    assert dispatch.remaining_timeout_seconds == 1800
    for name in (
        *("task_id", "instruction", "runtime", "agent", "builder", "evaluator", "metadata"),
        *("sampling", "prompting", "dispatch_priority"),
        *("init_timeout_seconds", "postrun_timeout_seconds"),
    ):
        assert getattr(dispatch, name) == getattr(request, name)


def test_a_session_that_no_node_reported_still_has_a_result():
    request = msgspec.convert(PAPER_TASK, TaskRequest)
    failure = Failure(boundary="lost_node", message="node a was lost", infra=True)
    result = tasks.unreported_result(
        request, session_id="ses-1", attempt_id=None, node_id=None, failure=failure
    )
    assert (result.status, result.error, result.failure) == ("ERROR", "node a was lost", failure)
    assert result.metadata == request.metadata
    assert result.trajectory is None
