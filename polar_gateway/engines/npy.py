"""Arrays in NumPy's file format, without NumPy. Pure."""

from builders.records import Ids

_MAGIC = b"\x93NUMPY\x01\x00"


def array_file(kind: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """`kind` is NumPy's name of the element type, such as "|u1" or "<i4"."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    # The data begins at a multiple of 64 bytes, behind a line's end.
    header += b" " * (-(len(_MAGIC) + 2 + len(header) + 1) % 64) + b"\n"
    return _MAGIC + len(header).to_bytes(2, "little") + header + data


def int32_file(values: Ids) -> bytes:
    """A row of ids."""
    return array_file("<i4", (len(values),), values.tobytes())
