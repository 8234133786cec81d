import gzip
import time
import zlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gateway.request_body import (
    LONE_SURROGATE_NOTE,
    MAX_FIELDS,
    MAX_VALUES,
    RefusedError,
    decoded,
    inflated,
    with_whole_characters,
    zstd,
)


def test_decompression_is_bounded_and_checked() -> None:
    assert inflated(gzip.compress(b"x" * 1000), "gzip", 1000) == b"x" * 1000
    for data, encoding, limit, status in [
        (gzip.compress(b"x" * 1_000_000), "gzip", 1000, 413),
        (b"no gzip", "gzip", 1000, 400),
        (gzip.compress(b"x" * 1000)[:-12], "gzip", 10_000, 400),
        (b"x", "zstd", 1000, 400),
    ]:
        with pytest.raises(RefusedError) as refused:
            inflated(data, encoding, limit)
        assert refused.value.kind.status == status


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)],
)
def test_a_body_compressed_in_several_parts_is_read_whole_or_not_at_all(
    encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    parts = [b"one ", b"", b"two ", b"x" * 992]
    body = b"".join(map(compress, parts))
    assert inflated(body, encoding, 1000) == b"".join(parts)
    for data, limit, said in [
        (body, 999, "larger than 999 bytes"),
        (body[:-5], 1000, "cut short"),
        (body + b"garbage", 1000, f"the body is not {encoding}"),
        (compress(b"") * 100, 1000, "more than 16 parts"),
    ]:
        with pytest.raises(RefusedError, match=said):
            inflated(data, encoding, limit)


def test_a_body_may_not_be_compressed_any_number_of_times() -> None:
    body = b"x" * 1000
    for _ in range(3):
        body = gzip.compress(body)
    assert inflated(body, "identity, gzip,gzip", 10_000) == gzip.compress(b"x" * 1000)
    with pytest.raises(RefusedError, match="encoded 3 times"):
        inflated(body, "gzip,gzip,gzip", 10_000)


def test_a_body_is_what_its_json_says() -> None:
    assert decoded(b'{"a": [1, "\xc3\xa9\\ud83d\\ude00"]}') == ({"a": [1, "\u00e9\U0001f600"]}, [])


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"{", 400, "the body is not JSON"),
        (b'{"a": "\\ud83d', 400, "the body is not JSON"),
        (b"[]", 400, "the body must be a JSON object"),
        (b'{"a": ' + b"[" * 100_000, 400, "the body is nested too deeply"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "the body is nested too deeply"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(MAX_FIELDS + 1)) + b"}", 413, "fields"),
        (b'{"a":[' + b"[]," * MAX_VALUES + b"1]}", 413, "the body holds too many values"),
        (b'{"a":[' + b"1," * MAX_VALUES + b"1]}", 413, "the body holds too many values"),
        (b"\xff" * 10, 400, "the body is not JSON"),
        (b'{"a": "\xff' + b"\\\\" * MAX_VALUES + b'"}', 400, "the body is not JSON"),
    ],
)
def test_what_is_no_request_or_too_much_of_one_is_refused_at_once(
    data: bytes, status: int, said: str
) -> None:
    began = time.process_time()
    with pytest.raises(RefusedError, match=said) as refused:
        decoded(data)
    assert refused.value.kind.status == status
    assert time.process_time() - began < 1.0


def test_nesting_that_is_read_leaves_room_for_those_who_walk_through_it_later() -> None:
    deepest = 0
    for depth in range(100, 900, 10):
        try:
            body, _ = decoded(b'{"a":' * depth + b"1" + b"}" * depth)
        except RefusedError:
            break
        deepest = depth
        nested = {"result": {"trajectory": {"traces": [{"tools": [{"function": body}]}]}}}
        assert msgspec.json.decode(msgspec.json.encode(nested)) == nested
    assert deepest > 200


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"cut \ud83d...", "cut \ufffd..."),
        (rb"\uD83D", "\ufffd"),
        (rb"\ude00 late", "\ufffd late"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\\\ud83d", "\\\ufffd"),
        (b"caf\xe9", "caf\ufffd"),
    ],
)
def test_half_a_character_is_replaced_and_said(sent: bytes, read: str) -> None:
    assert decoded(b'{"a":"' + sent + b'"}') == ({"a": read}, [LONE_SURROGATE_NOTE])


@given(st.text(st.sampled_from('\\u\U0001f600d83"x')))
def test_whole_characters_stay_as_they_are(text: str) -> None:
    data = msgspec.json.encode(text)
    escaped = data.replace("\U0001f600".encode(), rb"\ud83d\ude00")
    assert with_whole_characters(escaped) == escaped
