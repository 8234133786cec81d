"""What a command says: handed on as it comes, or kept, and then only the end of it."""

from collections.abc import Callable

from evaluators.base import ExecResult

KEPT_BYTES = 8 << 20
"""How much of each stream a result keeps."""

DIAGNOSTIC_BYTES = 4096
"""How much is kept of a stream that a callback takes, to explain a command that never started."""


class Tail:
    """The last `limit` bytes of a stream; holds twice that at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._limit:
            del self._kept[: -self._limit]

    def text(self) -> str:
        return self._kept[-self._limit :].decode(errors="replace")


class Output:
    """Both streams of one command, each with its callback or without."""

    def __init__(
        self,
        on_stdout: Callable[[bytes], None] | None,
        on_stderr: Callable[[bytes], None] | None,
    ) -> None:
        self._callbacks = (on_stdout, on_stderr)
        self._tails = tuple(
            Tail(KEPT_BYTES if callback is None else DIAGNOSTIC_BYTES)
            for callback in self._callbacks
        )

    def stdout(self, data: bytes) -> None:
        self._add(0, data)

    def stderr(self, data: bytes) -> None:
        self._add(1, data)

    def _add(self, which: int, data: bytes) -> None:
        callback = self._callbacks[which]
        if callback is not None:
            callback(data)
        self._tails[which].add(data)

    def said(self) -> str:
        """The end of both streams, for an error's text."""
        return "\n".join(text for tail in self._tails if (text := tail.text().strip()))

    def result(self, return_code: int) -> ExecResult:
        stdout, stderr = (
            tail.text() if callback is None else ""
            for tail, callback in zip(self._tails, self._callbacks, strict=True)
        )
        return ExecResult(stdout=stdout, stderr=stderr, return_code=return_code)
