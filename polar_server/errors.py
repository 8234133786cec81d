"""Refusals: what the server answers instead of doing it, as RFC 9457 problems."""

from polar_server.protocol import Problem


class RefusalError(Exception):
    """A request is refused; `field` is the path of what is wrong in its document."""

    def __init__(self, status: int, title: str, detail: str, *, field: str | None = None) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail, field=field)


def not_found(detail: str) -> RefusalError:
    return RefusalError(404, "Not found", detail)


def conflict(detail: str) -> RefusalError:
    return RefusalError(409, "Conflict", detail)


def malformed(detail: str) -> RefusalError:
    return RefusalError(400, "Malformed document", detail)


def invalid(detail: str, field: str | None) -> RefusalError:
    return RefusalError(422, "Invalid document", detail, field=field)


def too_large(limit: int) -> RefusalError:
    return RefusalError(413, "Content too large", f"the body must not exceed {limit} bytes")
