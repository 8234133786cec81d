import math
from typing import Any

import msgspec
import pytest

from polar_gateway.protocol import (
    PrepareAction,
    RuntimeSpec,
    Sampling,
    SessionDispatchRequest,
    SessionResult,
    agent_timeout,
    can_be_called,
    valid_id,
)


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "0" * 128])
def test_an_id_is_short_and_plain(name: str) -> None:
    assert valid_id(name)


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a b", "0" * 129, "ä"])
def test_what_could_be_a_path_is_no_id(name: str) -> None:
    assert not valid_id(name)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"type": "exec"}, "needs a command"),
        ({"type": "exec", "command": "x", "target": "/y"}, "takes no source or target"),
        ({"type": "upload_file", "source": "/x"}, "needs source and target"),
        ({"type": "upload_dir", "source": "/x", "target": "/y", "cwd": "/"}, "takes no command"),
        (
            {"type": "upload_dir", "source": "/x", "target": "/y", "max_attempts": 2},
            "attempted again",
        ),
        ({"type": "exec", "command": "x", "max_attempts": 11}, "max_attempts"),
        ({"type": "exec", "command": "x", "surprise": 1}, "surprise"),
    ],
)
def test_a_prepare_action_with_the_wrong_fields_is_refused_in_words(
    document: dict[str, Any], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(document, PrepareAction)


def test_a_runtime_has_the_known_defaults() -> None:
    spec = msgspec.convert({}, RuntimeSpec)
    assert (spec.backend, spec.network, spec.gpus, spec.allow_internet) == (
        "docker",
        "host",
        0,
        True,
    )
    assert spec.eval_prepare is None


@pytest.mark.parametrize("field", [{"temperature": -1}, {"top_p": 0}, {"tempreature": 1}])
def test_wrong_sampling_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(field, Sampling)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "10", True])
def test_an_agent_timeout_that_is_no_time_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"metadata\.agent_timeout"):
        agent_timeout({"agent_timeout": value})


def test_an_agent_timeout_may_be_missing_or_a_number() -> None:
    assert agent_timeout({}) is None
    assert agent_timeout({"agent_timeout": 5}) == 5.0


def test_documents_between_machines_tolerate_fields_of_a_newer_version() -> None:
    text = b'{"session_id":"s","task_id":"t","instruction":"i","agent":{"harness":"codex"},"new":1}'
    assert msgspec.json.decode(text, type=SessionDispatchRequest).builder.strategy == "per_request"
    result = b'{"session_id":"s","task_id":"t","status":"ERROR","novel":{}}'
    assert msgspec.json.decode(result, type=SessionResult).status == "ERROR"


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("http://127.0.0.1:8080/x", True),
        ("https://trainer.example/callback", True),
        ("http://[::1]:1/x", True),
        ("http://a..b/", False),
        ("http://a:port/", False),
        ("ftp://a/", False),
        ("/callback", False),
        (f"http://{'a' * 64}/", False),
    ],
)
def test_a_url_can_be_called_or_is_known_not_to_be(url: str, fine: bool) -> None:
    assert can_be_called(url) is fine
