"""Arrays in NumPy's file format, without NumPy."""


def array_file(kind: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """`kind` is NumPy's name of the element type, such as "|u1" or "<i4"."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
