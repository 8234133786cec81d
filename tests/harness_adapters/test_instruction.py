import pytest

from harness_adapters import instruction


def test_a_slash_at_the_start_is_shielded_by_a_space() -> None:
    assert instruction.as_words("cli -p", "/clear it") == "{ printf ' '; cat; } | cli -p"
    assert instruction.as_words("cli -p", "clear /it") == "cli -p"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Fix @app.py", True),
        ("the decorator @property", True),
        ("write to me@example.org", True),
        ("a @ b", False),
        ("no mention", False),
        ("/clear", False),
        ("@app.py and {{args}}", False),
        ("@app.py and !{ls}", False),
        ("@app.py and @{x}", False),
    ],
)
def test_a_mention_is_submitted_as_a_command_unless_that_would_fill_something_in(
    text: str, wanted: bool
) -> None:
    assert instruction.wants_command(text) is wanted


def test_the_command_is_all_that_the_cli_reads() -> None:
    assert instruction.as_command("cli") == "{ cat > /dev/null; printf /instruction; } | cli"
