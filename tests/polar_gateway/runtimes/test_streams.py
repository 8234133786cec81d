from polar_gateway.runtimes.streams import Output, Tail


def test_a_tail_keeps_the_end_and_little_more() -> None:
    tail = Tail(10)
    for number in range(1000):
        tail.add(b"%04d" % number)
    assert tail.text() == "9709980999"


def test_a_character_cut_in_two_does_not_break_the_text() -> None:
    tail = Tail(3)
    tail.add("aéé".encode())
    assert tail.text() == "\N{REPLACEMENT CHARACTER}é"


def test_what_a_callback_took_is_not_in_the_result_but_explains_a_failure() -> None:
    taken: list[bytes] = []
    output = Output(taken.append, None)
    output.stdout(b"out")
    output.stderr(b"err")
    result = output.result(1)
    assert (taken, result.stdout, result.stderr) == ([b"out"], "", "err")
    assert output.said() == "out\nerr"
