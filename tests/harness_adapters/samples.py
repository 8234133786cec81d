"""What the gateway would tell an adapter about a session."""

import msgspec

from harness_adapters.base import AgentSpec, LaunchContext

KEY = "sk-polar-0123456789"

CONTEXT = LaunchContext(
    session_id="ses_1",
    instruction='Fix the "bug" in $HOME/app.py; rm -rf `x`',
    model_name="Qwen/Qwen3.5-4B",
    model_url="http://127.0.0.1:8100",
    api_key=KEY,
    session_dir="/polar/session",
    home_dir="/polar/session/home",
    log_dir="/polar/session/logs/agent",
    instruction_path="/polar/session/instruction.md",
    workdir="/testbed",
    pack_dir="/polar/packs/x",
    context_length=40960,
    max_output_tokens=8192,
)


def context(**changes: object) -> LaunchContext:
    return msgspec.structs.replace(CONTEXT, **changes)


def agent(harness: str, **fields: object) -> AgentSpec:
    """An agent document as it comes over the wire."""
    return msgspec.convert({"harness": harness, **fields}, AgentSpec)
