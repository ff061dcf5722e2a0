"""What of the text goes out with which token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.text import TextAssembler


def feed(pieces: list[bytes], *stops: str) -> tuple[list[str | None], TextAssembler]:
    assembler = TextAssembler(stops)
    sent: list[str | None] = []
    for piece in pieces:
        sent.append(assembler.push(piece))
        if assembler.stopping_word is not None:
            break
    return sent, assembler


def test_a_token_inside_a_character_sends_nothing() -> None:
    assert feed([b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"b"])[0] == ["a", None, None, None, "😀", "b"]


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    assembler = TextAssembler()
    assert assembler.push(b"\xc3") is None
    assert assembler.push(b"", is_eos=True) == ""
    assert assembler.text == ""


def test_a_possible_stop_string_is_held_back_until_disproved() -> None:
    sent, assembler = feed([b"x", b" ST", b"O", b"RY"], "STOP")
    assert sent == ["x", "", "", " STORY"]
    assert assembler.text == "x STORY"


def test_a_stop_string_ends_the_text_before_it() -> None:
    sent, assembler = feed([b"one", b" ST", b"OP two"], "STOP", "two")
    assert sent == ["one", "", " "]
    assert assembler.stopping_word == "STOP"
    assert assembler.text == "one "


def test_the_text_of_an_answer_without_streaming_includes_held_text() -> None:
    sent, assembler = feed([b"a", b" S"], "STOP")
    assert sent == ["a", ""]
    assert assembler.text == "a S"


@given(st.text("STOPé ", max_size=40), st.integers(1, 3), st.lists(st.text("STOPé", min_size=1), max_size=3))
def test_what_was_sent_is_the_text_before_the_first_stop(text: str, size: int, stops: list[str]) -> None:
    raw = text.encode()
    sent, assembler = feed([raw[at : at + size] for at in range(0, len(raw), size)], *stops)
    received = "".join(part or "" for part in sent)
    assert assembler.text.startswith(received)
    if assembler.stopping_word is None:
        assert assembler.text == text
        assert not any(stop in text for stop in stops)
    else:
        assert received == assembler.text
        assert text.startswith(received)
        assert assembler.stopping_word in text


@pytest.mark.parametrize("stop", ["", "never"])
def test_stops_that_never_match_hold_nothing(stop: str) -> None:
    assert feed([b"a", b"b"], stop)[0] == ["a", "b"]
