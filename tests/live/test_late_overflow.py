"""An overflow that is found out when the answer's headers have left: an error inside the stream."""

from pathlib import Path
from typing import NamedTuple

import pytest

from polar_gateway.config import ModelCallConfig
from polar_gateway.testing.engine import Fault
from polar_gateway.testing.script import Step
from tests.live.driver import CLIS, assert_completed, assert_recorded, live, planting, rule

pytestmark = pytest.mark.clis

TOO_LONG = (
    "This model's maximum context length is 131072 tokens. However, your prompt contains at least"
    " 131073 input tokens, which exceeds this limit even without any output tokens. Please reduce"
    " the length of the input prompt. (parameter=input_tokens, value=131073)"
)


class Reaction(NamedTuple):
    """What a CLI does next."""

    calls: int
    """Of the engine, in all."""
    compacts: bool = False
    ends: bool = False


REACTIONS = {
    "codex": Reaction(3, ends=True),
    "claude_code": Reaction(4),
    "pi": Reaction(3, ends=True),
    "pi_old": Reaction(5, compacts=True),
    "gemini_cli": Reaction(3, ends=True),
    "qwen_code": Reaction(5, compacts=True),
    "opencode": Reaction(3, ends=True),
}
"""Claude Code takes it for a broken stream and asks again at once; an answer that fails before its
headers leave is a status, on which it compacts. pi finds nothing to drop after two turns."""


@pytest.mark.parametrize("harness", CLIS)
async def test_an_overflow_inside_a_stream_is_understood_or_ends_the_session_as_one(
    tmp_path: Path, harness: str
) -> None:
    ran = await live(
        tmp_path,
        harness,
        rule(
            r"\A(?!.*The functions you may call)",
            Step(say="<state_snapshot>Rows.</state_snapshot>"),
        ),
        planting(harness),
        instruction="Plant beans.",
        faults=[Fault(skip=2, status=400, message=TOO_LONG, delay=1.5)],
        model_calls=ModelCallConfig(header_delay_seconds=0.3),
    )
    wanted = REACTIONS[harness]
    assert len(ran.calls) == len(ran.wire.requests) == wanted.calls, ran.how
    assert ("compaction" in {one.kind for one in ran.completions}) == wanted.compacts
    if wanted.ends:
        assert ran.result.status == "ERROR"
        assert ran.result.failure is not None
        assert ran.result.failure.code == "context_overflow"
    else:
        assert_completed(ran)
    assert (ran.workdir / "beans.txt").read_text() == "one\ntwo\n"
    assert_recorded(ran)
