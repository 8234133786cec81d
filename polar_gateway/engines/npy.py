"""Arrays of ids as the bytes of .npy files, without numpy. Pure."""

from builders.records import Ids

MAGIC = b"\x93NUMPY\x01\x00"


def int32_file(values: Ids) -> bytes:
    """A one-dimensional array."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({len(values)},), }}"
    # numpy wants the data to begin at a multiple of 64 bytes, and a line's end before it.
    padding = -(len(MAGIC) + 2 + len(header) + 1) % 64
    line = header.encode() + b" " * padding + b"\n"
    return MAGIC + len(line).to_bytes(2, "little") + line + values.tobytes()
