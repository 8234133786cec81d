import pytest

from harness_adapters import gemini_family


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
    assert gemini_family.wants_command(text) is wanted


def test_the_command_is_all_that_the_cli_reads() -> None:
    assert gemini_family.as_command("cli") == "{ cat > /dev/null; printf /instruction; } | cli"
