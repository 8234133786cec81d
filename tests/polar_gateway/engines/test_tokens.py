import math
from array import array

import pytest

from polar_gateway.engines.tokens import checked_tokens

PROMPT = array("i", [7, 8])


def test_what_agrees_is_kept_as_it_is() -> None:
    tokens = checked_tokens(PROMPT, [1, 2], [-0.5, 0.0], 2)
    assert tokens.prompt_ids is PROMPT
    assert tokens.sampled_ids == array("i", [1, 2])
    assert tokens.logprobs == array("f", [-0.5, 0.0])
    assert tokens.findings == []


def test_an_engine_that_does_not_count_is_not_contradicted() -> None:
    assert checked_tokens(PROMPT, [1, 2], [-1.0, -1.0], None).findings == []


@pytest.mark.parametrize(
    ("logprobs", "findings"),
    [
        ([], ["logprobs_missing"]),
        ([-1.0], ["logprobs_misaligned"]),
        ([-1.0, None], ["logprobs_null"]),
        ([-1.0, math.nan], ["logprobs_non_finite"]),
        ([-1.0, math.inf], ["logprobs_non_finite"]),
        ([-1.0, 0.25], ["logprobs_positive"]),
        ([-1.0, -9999.0], ["logprobs_minus_infinity"]),
        ([-1.0, -math.inf], ["logprobs_minus_infinity"]),
        ([None, 0.25], ["logprobs_null", "logprobs_positive"]),
    ],
)
def test_each_way_to_be_no_log_probability_has_its_name_and_nothing_is_made_up(
    logprobs: list[float | None], findings: list[str]
) -> None:
    tokens = checked_tokens(PROMPT, [1, 2], logprobs, 2)
    assert tokens.findings == findings
    assert tokens.logprobs is None
    assert tokens.sampled_ids == array("i", [1, 2])


def test_missing_ids_are_said_and_a_count_that_differs_is() -> None:
    assert checked_tokens(None, None, [], None).findings == ["prompt_ids_missing", "ids_missing"]
    short = checked_tokens(PROMPT, [1], [-1.0], 2)
    assert short.findings == ["ids_usage_mismatch"]
    assert short.logprobs == array("f", [-1.0])
