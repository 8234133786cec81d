from harness_adapters import events


def test_the_last_event_of_a_kind_is_found_among_other_output() -> None:
    tail = b'cut"}\n{"type":"a","n":1}\n[1]\nnoise\n{"type":"a","n":2}\n{"type":"b"}\n{"ty'
    assert events.last_event(tail, ("a",)) == {"type": "a", "n": 2}
    assert events.last_event(tail, ("c",)) is None


def test_an_event_quoted_inside_another_does_not_count() -> None:
    tail = b'{"type":"item","text":"\\n{\\"type\\":\\"done\\"}\\n"}\n'
    assert events.last_event(tail, ("done",)) is None


def test_bytes_that_are_no_text_are_passed_over() -> None:
    assert events.last_event(b'\xff\xfe{"type":"a"}\n{"type":"a","ok":1}', ("a",)) == {
        "type": "a",
        "ok": 1,
    }
    assert events.last_line(b"fine\n\xff\n\n") == "\ufffd"


def test_a_harness_is_not_quoted_at_length() -> None:
    reason = events.quote("it failed", "word\n" * 1000)
    assert reason.startswith("it failed: word word ")
    assert len(reason) < 600
