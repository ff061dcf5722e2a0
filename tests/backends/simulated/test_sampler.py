"""Generated tokens are a function of the context alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.config import ScriptedReply
from backends.simulated.sampler import ScriptPlayer, TextSampler, reply_limit
from backends.simulated.tokenizer import EOS, byte_token, decode, decode_bytes, encode


def chat(text: str) -> list[int]:
    return encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def generate(prompt: list[int], *, most: int = 200, seed: int | None = None, rate: float = 0.3) -> list[int]:
    sampler = TextSampler(prompt, eos_probability=0.01, multibyte_rate=rate, seed=seed)
    tokens: list[int] = []
    while len(tokens) < most and (not tokens or tokens[-1] != EOS):
        tokens.append(sampler.next_token())
    return tokens


@given(st.text("abc ", max_size=12), st.integers(1, 60), st.none() | st.integers(0, 99), st.data())
def test_a_turn_cut_anywhere_goes_on_as_if_it_was_not(
    text: str, length: int, seed: int | None, data: st.DataObject
) -> None:
    prompt = chat(f"{text} [len={length}]")
    whole = generate(prompt, seed=seed)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert whole[:cut] + generate(prompt + whole[:cut], seed=seed) == whole
    assert len(whole) == length + 1
    assert whole[-1] == EOS
    assert decode_bytes(whole[:-1]).decode()


def test_without_a_marker_the_end_comes_by_chance_but_always_at_the_same_place() -> None:
    whole = generate(chat("hello"), most=5000)
    assert whole[-1] == EOS
    assert generate(chat("hello"), most=5000) == whole
    assert generate(chat("hello") + whole[:7], most=5000) == whole[7:]


def test_prompts_that_differ_far_back_get_different_replies() -> None:
    filler = " word" * 300
    assert generate(chat("a" + filler)) != generate(chat("b" + filler))


def test_the_seed_changes_the_text() -> None:
    assert generate(chat("hello"), seed=1) == generate(chat("hello"), seed=1)
    assert generate(chat("hello"), seed=1) != generate(chat("hello"), seed=2)
    assert generate(chat("hello"), seed=1) != generate(chat("hello"))


def test_ignored_end_never_comes() -> None:
    sampler = TextSampler(chat("[len=3]"), eos_probability=1, multibyte_rate=0, ignore_eos=True)
    assert EOS not in [sampler.next_token() for _ in range(50)]


@pytest.mark.parametrize(
    ("context", "left"),
    [
        (encode("no marker"), None),
        (encode("raw prompt [len=20]"), 20),
        (encode("raw prompt [len=20] two"), 19),
        (chat("[len=5] first, the last one counts: [len=7]"), 7),
        (chat("[len=123]") + encode(" so it is"), 120),
        (chat("[len=2]") + encode(" so it is"), 0),
        (chat("len=7] [len=] [len=x]"), None),
        (chat("[len=12345]"), 12345),
    ],
)
def test_the_marker_counts_from_the_assistant_header(context: list[int], left: int | None) -> None:
    assert reply_limit(context) == left


def test_a_foreign_unfinished_character_is_completed() -> None:
    prompt = [*chat("x"), byte_token(0xF1)]
    sampler = TextSampler(prompt, eos_probability=0, multibyte_rate=0)
    decode_bytes([prompt[-1], *(sampler.next_token() for _ in range(3))]).decode()


DELTAS = (
    {"content": "Let me look. "},
    {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "read", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"path": "a"}'}}]},
)


def play(player: ScriptPlayer) -> list[object]:
    played: list[object] = []
    while (token := player.next_token()) != EOS:
        assert decode([token])
        if player.due_delta is not None:
            played.append(player.due_delta)
    return played


def test_a_script_is_played_delta_by_delta() -> None:
    assert play(ScriptPlayer(ScriptedReply("", DELTAS))) == list(DELTAS)


def test_a_continued_script_leaves_out_what_was_sent() -> None:
    reply = ScriptedReply("", DELTAS)
    assert play(ScriptPlayer(reply, {"content": "Let me look. "})) == list(DELTAS[1:])
    assert play(ScriptPlayer(reply, {"content": "Let me"})) == [{"content": " look. "}, *DELTAS[1:]]
    assert play(ScriptPlayer(reply, {"content": "Something else"})) == list(DELTAS)


def test_a_continued_script_knows_reasoning_from_content() -> None:
    deltas = ({"reasoning_content": "First"}, {"reasoning_content": " this."}, *DELTAS)
    reply = ScriptedReply("", deltas)
    assert play(ScriptPlayer(reply, {"reasoning_content": "First"})) == list(deltas[1:])
    assert play(ScriptPlayer(reply, {"reasoning_content": "First th"})) == [
        {"reasoning_content": "is."},
        *DELTAS,
    ]
    said = {"reasoning_content": "First this.", "content": "Let me look. "}
    assert play(ScriptPlayer(reply, said)) == list(DELTAS[1:])
    assert play(ScriptPlayer(reply, {"content": "Let me look. "})) == list(DELTAS[1:])
