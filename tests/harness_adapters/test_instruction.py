from harness_adapters import instruction


def test_a_slash_at_the_start_is_shielded_by_a_space() -> None:
    assert instruction.as_words("cli -p", "/clear it") == "{ printf ' '; cat; } | cli -p"
    assert instruction.as_words("cli -p", "clear /it") == "cli -p"
