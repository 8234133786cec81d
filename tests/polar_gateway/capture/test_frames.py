import random
from binascii import crc32

import pytest

from polar_gateway.capture import frames
from polar_gateway.capture.frames import MAGIC, SMALL, DamagedError, Reader, encode

BODIES = [b"", b"a", bytes(SMALL - 1), b"abc" * SMALL, random.Random(1).randbytes(5 * SMALL)]


def test_bodies_come_back_in_order_with_their_places() -> None:
    written = [encode(body) for body in BODIES]
    reader = Reader(MAGIC + b"".join(written))
    read = list(reader)
    assert [frame.body for frame in read] == BODIES
    assert [frame.size for frame in read] == [len(frame) for frame in written]
    assert read[0].offset == len(MAGIC)
    assert reader.ending == (read[-1].offset + read[-1].size, "", False)


def test_only_what_gets_smaller_is_packed() -> None:
    head = len(encode(b""))
    assert [len(encode(body)) - head < len(body) for body in BODIES] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_length_that_was_damaged_is_not_taken_for_a_frame_that_was_cut_off() -> None:
    data = bytearray(MAGIC + encode(b"first") + encode(b"second"))
    data[len(MAGIC) + 2] = 0xFF  # of the first one's length
    reader = Reader(bytes(data))
    assert list(reader) == []
    assert reader.ending.damaged
    assert reader.ending.problem == "the head of a record is not what was written, at byte 16"


def test_a_packed_body_that_cannot_be_unpacked_is_damage() -> None:
    broken = bytearray(encode(b"x"))
    whole = frames._FIELDS.pack(1, frames.COMPRESSED, crc32(b"x"))
    broken[: len(whole)] = whole
    broken[len(whole) : len(whole) + 4] = frames._CHECK.pack(crc32(whole))
    with pytest.raises(DamagedError, match="a record cannot be unpacked"):
        frames.decode(bytes(broken))


def test_one_frame_is_decoded_only_if_it_is_whole_and_alone() -> None:
    frame = encode(b"abc")
    assert frames.decode(frame) == b"abc"
    for other in (frame[:-1], frame + b"\0", b"", frame + frame):
        with pytest.raises(DamagedError):
            frames.decode(other)
