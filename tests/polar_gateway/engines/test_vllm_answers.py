import base64
import json
from array import array
from typing import Any

import pytest

from builders.records import VersionSpan
from polar_gateway.engines.base import EngineError
from polar_gateway.engines.npy import array_file
from polar_gateway.engines.vllm_answers import chat_pieces, whole_answer
from tests.polar_gateway.engines.servers import recording


def answer(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"finish_reason": "stop", **choice}]}).encode()


def test_a_generated_answer_says_which_weights_sampled_which_tokens() -> None:
    recorded = recording("generate_across_versions")["response"]
    piece = whole_answer(json.dumps(recorded).encode())
    assert piece.versions == [
        VersionSpan(version="step-1", start=0, end=239),
        VersionSpan(version="step-2", start=239, end=600),
    ]
    assert piece.ids == recorded["choices"][0]["token_ids"]
    assert piece.counts is not None
    assert piece.counts.completion_tokens == 600


def test_routed_experts_are_the_file_that_was_sent() -> None:
    sent = array_file("|u1", (1, 2), b"\x01\x02")
    piece = whole_answer(answer(routed_experts=base64.b64encode(sent).decode()))
    [tensor] = piece.tensors
    assert (tensor.name, tensor.data) == ("routed_experts", sent)
    with pytest.raises(EngineError, match="no base64"):
        whole_answer(answer(routed_experts="?"))


def test_nucleus_ids_are_all_sets_in_a_row_and_where_each_ends() -> None:
    piece = whole_answer(answer(sampling_mask=[[5, 6], [], [7]]))
    ids, ends = piece.tensors
    assert (ids.name, ends.name) == ("sampling_mask", "sampling_mask_ends")
    assert ids.data == array_file("<i4", (3,), array("i", [5, 6, 7]).tobytes())
    assert ends.data == array_file("<i4", (3,), array("i", [2, 2, 3]).tobytes())


@pytest.mark.parametrize(("word", "value"), [("Infinity", "inf"), ("-Infinity", "-inf")])
def test_numbers_that_json_has_no_word_for_are_read(word: str, value: str) -> None:
    text = answer(logprobs={"content": [{"logprob": 1.5}]}).replace(b"1.5", word.encode())
    assert whole_answer(text).logprobs == [float(value)]
    text = answer(logprobs={"content": [{"logprob": 1.5}]}).replace(b"1.5", b"NaN")
    assert str(whole_answer(text).logprobs) == "[nan]"


def test_an_event_without_choices_counts_all_the_same() -> None:
    [piece] = chat_pieces(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}')
    assert piece.counts is not None
    assert (piece.counts.prompt_tokens, piece.counts.completion_tokens) == (3, 2)
    assert piece.ids is None
