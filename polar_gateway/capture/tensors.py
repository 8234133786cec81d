"""What an engine sends beside the tokens and is too large for the journal: files beside it.

A file is named by what it holds, so that what is sent twice is kept once.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from builders.records import TensorRef
from polar_gateway.capture.journal import CaptureError, sync_folder
from polar_gateway.engines.base import Tensor

FOLDER = "tensors"


def store(folder: Path, tensors: Sequence[Tensor], *, sync: bool) -> list[TensorRef]:
    """Write the tensors below the journal's folder; blocks. Raises CaptureError."""
    below = folder / FOLDER
    kept = []
    try:
        below.mkdir(mode=0o700, exist_ok=True)
        for tensor in tensors:
            digest = hashlib.sha256(tensor.data).hexdigest()
            file = below / f"{digest}.npy"
            if not file.exists():
                _write(file, tensor.data, sync=sync)
            kept.append(
                TensorRef(
                    name=tensor.name,
                    file=f"{FOLDER}/{file.name}",
                    bytes=len(tensor.data),
                    sha256=digest,
                )
            )
        if sync:
            sync_folder(below)
    except OSError as error:
        raise CaptureError(f"cannot keep a tensor in {below}: {error.strerror}") from error
    return kept


def _write(file: Path, data: bytes, *, sync: bool) -> None:
    """The file is there whole or not at all."""
    part = file.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as writing:
            writing.write(data)
            if sync:
                writing.flush()
                os.fdatasync(writing.fileno())
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
