import json
from typing import Any

import pytest

from polar_gateway.dialects import openai
from polar_gateway.dialects.turn import ErrorKind


@pytest.mark.parametrize(
    ("code", "given", "status"),
    [
        ("context_overflow", 422, 400),
        ("rate_limit", 503, 429),
        ("overloaded", 529, 503),
        ("too_large", 413, 413),
        ("session_closed", 400, 400),
        ("internal", 502, 502),
    ],
)
def test_an_error_has_the_status_that_its_clients_know(code: Any, given: int, status: int) -> None:
    assert openai.error_status(ErrorKind(status=given, code=code, message="No.")) == status


def test_an_error_names_the_field_that_it_is_about() -> None:
    error = ErrorKind(status=400, code="not_found", message="No.", param="previous_response_id")
    assert json.loads(openai.error_body(error))["error"] == {
        "message": "No.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }
