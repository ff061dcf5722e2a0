"""The tokeniser is reversible, and generated text tokenises back to the ids it came from."""

from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.sampler import TextSampler
from backends.simulated.tokenizer import (
    EOS,
    IM_END,
    IM_START,
    N_VOCAB,
    decode,
    decode_bytes,
    encode,
    valid_tokens,
)

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab 1_\n.é<|im_start>")


@given(texts, st.booleans())
def test_decoding_gives_the_text_back(text: str, parse_special: bool) -> None:
    tokens = encode(text, parse_special=parse_special)
    assert decode(tokens) == text
    assert valid_tokens(tokens)


def test_characters_outside_ascii_span_several_tokens() -> None:
    assert len(encode("é")) == 2
    assert len(encode("😀")) == 4
    assert decode(encode("😀")[:3]) == "\ufffd"


def test_chat_markers_are_single_tokens_only_when_parsed() -> None:
    assert encode("<|im_start|>user<|im_end|>")[0] == IM_START
    assert encode("<|im_start|>user<|im_end|>")[-1] == IM_END
    assert IM_START not in encode("<|im_start|>", parse_special=False)


def test_ids_outside_the_vocabulary_are_known() -> None:
    assert not valid_tokens([-1])
    assert not valid_tokens([N_VOCAB])
    assert valid_tokens([])


@given(st.text("abc ", max_size=20), st.integers(0, 60))
def test_generated_text_tokenises_to_its_own_ids(question: str, length: int) -> None:
    prompt = encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    sampler = TextSampler(prompt, eos_probability=0, multibyte_rate=0.3)
    generated = [sampler.next_token() for _ in range(length)]
    complete = decode_bytes(generated).decode(errors="ignore")
    again = encode(complete, parse_special=False)
    assert again == generated[: len(again)]
    assert EOS not in generated
