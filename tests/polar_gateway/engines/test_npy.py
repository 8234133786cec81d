import ast
from array import array

import pytest

from polar_gateway.engines.npy import array_file


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), (100, 48, 8)])
def test_the_header_says_what_follows_at_a_multiple_of_64(shape: tuple[int, ...]) -> None:
    data = array("i", [1, -2, 3]).tobytes()
    made = array_file("<i4", shape, data)
    assert made[:8] == b"\x93NUMPY\x01\x00"
    begins = 10 + int.from_bytes(made[8:10], "little")
    assert begins % 64 == 0
    assert made[begins:] == data
    assert made[begins - 1 : begins] == b"\n"
    described = ast.literal_eval(made[10:begins].decode())
    assert described == {"descr": "<i4", "fortran_order": False, "shape": shape}
