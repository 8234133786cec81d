"""A module's test lies where the module lies, so that one finds the other without looking."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "polar_client",
    "polar_server",
    "polar_gateway",
    "harness_adapters",
    "builders",
    "evaluators",
)

TESTED_ELSEWHERE: dict[str, str] = {
    # Shapes without behaviour: what reads and writes them tests them.
    "harness_adapters/base.py": "an interface; every adapter's test goes by it",
    "polar_gateway/dialects/turn.py": "the words that dialects and engines share",
    "polar_gateway/engines/base.py": "an interface; test_vllm.py goes by it",
    "polar_gateway/engines/answers.py": "what answers of every engine add up to; test_vllm.py",
    "polar_gateway/engines/chat_body.py": "what every engine is asked; test_vllm.py",
    "polar_gateway/engines/http_client.py": "under every engine; test_vllm.py",
    "polar_gateway/engines/streams.py": "under every streamed answer in test_vllm.py",
    "polar_server/protocol.py": "structs; test_tasks.py holds TaskRequest to its rules",
    "polar_server/store/records.py": "rows as structs",
    "polar_server/store/tables.py": "the schema",
    # Parts of one thing, which is tested as one.
    "builders/assemble.py": "what both builders end with; test_invariants.py",
    "polar_gateway/app.py": "started as a process by tests/integration and test_cli_services.py",
    "polar_gateway/node.py": "behind its routes, test_api.py, and started by tests/integration",
    "polar_gateway/dialects/anthropic_tools.py": "the tools of Messages; test_anthropic.py",
    "polar_gateway/dialects/google_answers.py": "what Google is answered; test_google.py",
    "polar_gateway/exchange.py": "one end of every call in test_proxy.py",
    "polar_gateway/dialects/sse.py": "the form of every stream in test_recordings.py",
    "polar_gateway/runtimes/netns.py": "a port in a container's network; test_docker.py",
    "polar_gateway/runtimes/processes.py": "finding and killing trees; test_base.py, in every runtime",
    "polar_gateway/runtimes/supervise.py": "the parent of what `local` runs; test_base.py",
    "polar_gateway/testing/chat_request.py": "what the scripted engine takes; test_engine.py",
    "polar_gateway/engines/chat.py": "what engines share; test_vllm.py, test_sglang.py",
    "polar_gateway/engines/chat_api.py": "which models a server has; test_vllm.py, test_sglang.py",
    "polar_gateway/engines/probing.py": "what probes share; test_vllm_probe.py, test_sglang.py, test_openai.py",
    "polar_gateway/engines/ids_at_end.py": "SGLang's streams; test_sglang.py",
    "polar_gateway/engines/openai_probe.py": "test_openai.py",
    "polar_gateway/engines/sglang_answers.py": "what SGLang says; test_sglang.py",
    "polar_gateway/engines/sglang_api.py": "what SGLang is asked; test_sglang.py",
    "polar_gateway/engines/sglang_probe.py": "test_sglang.py",
    "polar_gateway/testing/sglang_answers.py": "what the server of test_sglang.py answers",
    "polar_gateway/testing/calls.py": "what scripted servers remember; test_engine.py",
    "polar_gateway/testing/endpoint.py": "one end of every scripted answer; test_engine.py",
    "polar_gateway/testing/generate_request.py": "what the token routes take; test_engine.py",
    "polar_gateway/testing/routes.py": "under every scripted server; test_engine.py",
    "polar_gateway/testing/vllm_answers.py": "what the scripted engine answers; test_engine.py",
    "polar_gateway/testing/server.py": "under every scripted server; test_engine.py",
    "polar_gateway/testing/serve.py": "under every test that serves something",
    "polar_gateway/testing/tiny_model/make_model.py": "runs in vLLM's environment; test_vllm_and_script.py",
    "polar_gateway/testing/tiny_model/scripted_logits.py": "runs inside vLLM; test_vllm_and_script.py",
    "polar_gateway/testing/tiny_model/train_tokenizer.py": "test_tokenizer.py",
    "polar_server/documents.py": "what routes answer; test_api.py",
    "polar_server/errors.py": "what routes refuse with; test_api.py",
    "polar_server/store/engine.py": "under every test of the server; test_app.py for restarts",
    "polar_server/store/queries.py": "behind the routes and loops that ask; test_api.py, test_scheduler.py",
}
"""Modules without a file of their own among the tests, and where they are tested instead."""


def modules() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py"):
                yield str(path.relative_to(ROOT))


def mirrored(module: str) -> Path:
    path = Path(module)
    if path.parent.name == "cli":  # one folder of tests for all that people type
        return ROOT / "tests" / path.parent.parent / f"test_cli_{path.name}"
    return ROOT / "tests" / path.parent / f"test_{path.name}"


def test_every_module_has_its_test_or_a_reason_why_not() -> None:
    missing = [
        name for name in modules() if not mirrored(name).exists() and name not in TESTED_ELSEWHERE
    ]
    assert not missing


def test_no_exception_has_outlived_its_reason() -> None:
    known = set(modules())
    stale = [name for name in TESTED_ELSEWHERE if name not in known or mirrored(name).exists()]
    assert not stale
