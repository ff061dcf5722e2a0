"""A reversible tokeniser without state: every token id carries its own bytes.

ASCII text is cut into words with their leading space, then into pieces of at most four characters, and a
piece's characters are the digits of its id. Everything else is one token per byte, so a character outside
ASCII always spans several tokens. Two processes, or two runs, therefore agree on every id.

Text made of the generator's own words is tokenised back to exactly the ids it was generated from, which
keeps a turn that is resumed from its text equal to the uninterrupted one.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

END_OF_TEXT, IM_START, IM_END = range(3)
EOS = IM_END
SPECIAL_TEXTS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_BYTE_BASE = len(SPECIAL_TEXTS)
_PIECE_BASES = {
    2: _BYTE_BASE + 256,
    3: _BYTE_BASE + 256 + 128**2,
    4: _BYTE_BASE + 256 + 128**2 + 128**3,
}
N_VOCAB = _PIECE_BASES[4] + 128**4
"""Ids are 0 to N_VOCAB - 1."""

_SPECIAL = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TEXTS) + ")")
_WORD = re.compile(r" {2,}(?= )| ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]|\s", re.ASCII)


def encode(text: str, *, parse_special: bool = True) -> list[int]:
    """Token ids of `text`; `decode(encode(text)) == text` for every text that is valid UTF-8.

    With `parse_special` the chat markers become one special token each, otherwise they are plain text.
    """
    tokens: list[int] = []
    for part in _SPECIAL.split(text) if parse_special else (text,):
        if parse_special and part in SPECIAL_TEXTS:
            tokens.append(SPECIAL_TEXTS.index(part))
            continue
        for word in _WORD.findall(part):
            tokens.extend(_encode_word(word))
    return tokens


def byte_token(value: int) -> int:
    """The token of a single byte."""
    return _BYTE_BASE + value


def lone_byte(token: int) -> int | None:
    """The byte of a one-byte token, None for any other token."""
    return token - _BYTE_BASE if _BYTE_BASE <= token < _BYTE_BASE + 256 else None


@lru_cache(maxsize=1 << 16)
def token_bytes(token: int) -> bytes:
    """The text of a token. Raises ValueError for an id outside the vocabulary."""
    if 0 <= token < _BYTE_BASE:
        return SPECIAL_TEXTS[token].encode()
    if token < 0 or token >= N_VOCAB:
        raise ValueError(f"token {token} is not in the vocabulary")
    if token < _PIECE_BASES[2]:
        return bytes((token - _BYTE_BASE,))
    length = next(n for n in (4, 3, 2) if token >= _PIECE_BASES[n])
    value = token - _PIECE_BASES[length]
    return bytes((value >> (7 * shift)) & 0x7F for shift in reversed(range(length)))


def decode_bytes(tokens: Iterable[int]) -> bytes:
    """The concatenated bytes of the tokens, which may end inside a character."""
    return b"".join(map(token_bytes, tokens))


def decode(tokens: Iterable[int]) -> str:
    """The text of the tokens; incomplete characters become U+FFFD."""
    return decode_bytes(tokens).decode(errors="replace")


def valid_tokens(tokens: Sequence[int]) -> bool:
    """Whether every id is in the vocabulary."""
    return not tokens or (min(tokens) >= 0 and max(tokens) < N_VOCAB)


@lru_cache(maxsize=1 << 16)
def _encode_word(word: str) -> tuple[int, ...]:
    if not word.isascii():
        return tuple(map(byte_token, word.encode()))
    return tuple(_encode_piece(word[at : at + 4].encode()) for at in range(0, len(word), 4))


def _encode_piece(piece: bytes) -> int:
    if len(piece) == 1:
        return byte_token(piece[0])
    value = 0
    for byte in piece:
        value = value << 7 | byte
    return _PIECE_BASES[len(piece)] + value
