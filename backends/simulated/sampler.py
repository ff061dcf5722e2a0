"""Where generated tokens come from: a pure function of the context, or a scripted reply.

`TextSampler` hashes the whole context (all token ids before the next one) and picks a token by the hash.
The same context therefore always continues the same way, wherever it was cut and resumed, on any slot, in
any process. With a temperature above zero the seed is hashed too: the text differs by seed, and is still
reproducible.

A marker `[len=N]` in the prompt ends the reply after exactly N tokens. They are counted from the last
`<|im_start|>assistant` header, or from the marker if there is no header after it, so a resumed prompt that
already holds k tokens of the reply gets N - k more.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from backends.simulated.config import ScriptedReply
from backends.simulated.template import read_calls
from backends.simulated.tokenizer import EOS, IM_START, byte_token, encode, lone_byte, token_bytes

_WORD_LIST = (
    "the and for not you all any can her was one our out day get has him his how man new now old see two way "
    "who boy did its let put say she too use add api bug bit bus cat cmd cpu dir end env err fix git gpu hex "
    "int job key law led log map max min net nil obj opt pop ram ref row run set sql sum tab tag tcp url utf "
    "var web xor yes a i in is it of on or to by we if do an as at be go he me my no so up us"
)
_WORDS = tuple(encode(" " + word)[0] for word in _WORD_LIST.split())
"""With its leading space each is one token."""
_WORD_SET = frozenset(_WORDS)
_MULTIBYTE = tuple(
    tuple(map(byte_token, char.encode()))
    for char in ("é", "ü", "ß", "λ", "Ж", "中", "語", "→", "€", "😀", "🚀")
)
_COMMA, _STOP, _NEWLINE = (byte_token(ord(char)) for char in ",.\n")
_ASSISTANT_HEADER = encode("assistant\n")
_LEN, _EQUALS, _CLOSE = encode("len")[0], encode("=")[0], encode("]")[0]


class Sampler(Protocol):
    """A source of tokens for one request."""

    def next_token(self) -> int:
        """The next token; the end is the EOS token."""


class TextSampler:
    """Continues a context deterministically. `context` is the whole prompt, resumed text included."""

    def __init__(
        self,
        context: Sequence[int],
        *,
        eos_probability: float,
        multibyte_rate: float,
        ignore_eos: bool = False,
        seed: int | None = None,
    ) -> None:
        self._eos_below = 0 if ignore_eos else int(eos_probability * (1 << 32))
        self._multibyte_below = int(multibyte_rate * (1 << 16))
        limit = reply_limit(context)
        self._tokens_left = None if limit is None or ignore_eos else limit
        if self._tokens_left is not None:
            self._eos_below = 0
        self._hash = blake2b(digest_size=8, salt=b"" if seed is None else (seed & (2**64 - 1)).to_bytes(8))

        unfinished = _unfinished_character(context)
        whole = len(context) - len(unfinished)
        self._hash.update(array("I", context[:whole]).tobytes())
        self._last = context[whole - 1] if whole else None
        self._rest_of_character: deque[int] = deque()
        if unfinished:
            self._resume_character(unfinished)

    def next_token(self) -> int:
        if self._rest_of_character:
            token = self._rest_of_character.popleft()
        else:
            chosen = self._choose(self._tokens_left)
            token = chosen[0]
            self._rest_of_character.extend(chosen[1:])
        self._append(token)
        if self._tokens_left is not None:
            self._tokens_left -= 1
        return token

    def _append(self, token: int) -> None:
        self._hash.update(array("I", (token,)).tobytes())
        self._last = token

    def _choose(self, tokens_left: int | None) -> tuple[int, ...]:
        draw = int.from_bytes(self._hash.copy().digest())
        if (tokens_left is not None and tokens_left <= 0) or draw & 0xFFFFFFFF < self._eos_below:
            return (EOS,)
        kind, choice = draw >> 32 & 0xFFFF, draw >> 48
        if kind < self._multibyte_below:
            character = _MULTIBYTE[choice % len(_MULTIBYTE)]
            if tokens_left is None or len(character) <= tokens_left:
                return character
        if self._last == _STOP and choice % 4 == 0:
            return (_NEWLINE,)
        if self._last in _WORD_SET and choice % 12 == 0:
            return (_STOP if kind & 1 else _COMMA,)
        return (_WORDS[choice % len(_WORDS)],)

    def _resume_character(self, unfinished: Sequence[int]) -> None:
        """Completes a character the context ends in as the sampler that began it would have.

        Its length limit counted the tokens of the unfinished character as not yet used.
        """
        left = None if self._tokens_left is None else self._tokens_left + len(unfinished)
        begun = self._choose(left)
        if begun[: len(unfinished)] == tuple(unfinished):
            rest: Sequence[int] = begun[len(unfinished) :]
        else:
            lead = lone_byte(unfinished[0]) or 0
            rest = [byte_token(0xA0 if lead == 0xE0 else 0x90)] * (_character_length(lead) - len(unfinished))
        self._rest_of_character.extend(rest)
        for token in unfinished:
            self._append(token)


class ScriptPlayer:
    """Plays a scripted reply: filler tokens worth each delta's text, the delta with the last of them.

    `already_sent` is the message to continue; the script goes on after its reasoning, its content and the
    calls in that.
    """

    def __init__(self, reply: ScriptedReply, already_sent: Mapping[str, Any] | None = None) -> None:
        self.finish_reason = reply.finish_reason
        self.due_delta: Mapping[str, Any] | None = None
        """The delta that goes out with the token just returned by `next_token`, if any."""
        self._steps: deque[tuple[int, Mapping[str, Any] | None]] = deque()
        for delta in _remaining_deltas(reply.deltas, already_sent or {}):
            tokens = encode(_delta_text(delta), parse_special=False) or [byte_token(0x20)]
            self._steps.extend((token, None) for token in tokens[:-1])
            self._steps.append((tokens[-1], delta))

    def next_token(self) -> int:
        token, self.due_delta = self._steps.popleft() if self._steps else (EOS, None)
        return token


def reply_limit(context: Sequence[int]) -> int | None:
    """Tokens left of the reply by the last `[len=N]` marker of the context, None without a marker."""
    context = list(context)
    marker = _last_marker(context)
    if marker is None:
        return None
    limit, start = marker
    try:
        header = len(context) - 1 - context[::-1].index(IM_START)
    except ValueError:
        header = -1
    if header >= start and context[header + 1 : header + 1 + len(_ASSISTANT_HEADER)] == _ASSISTANT_HEADER:
        start = header + 1 + len(_ASSISTANT_HEADER)
    return max(0, limit - (len(context) - start))


def _last_marker(context: list[int]) -> tuple[int, int] | None:
    """Value of the last marker and the position after it."""
    found: tuple[int, int] | None = None
    at = -1
    while True:
        try:
            at = context.index(_LEN, at + 1)
        except ValueError:
            return found
        try:
            close = context.index(_CLOSE, at + 1, at + 6)
        except ValueError:
            continue
        digits = b"".join(map(token_bytes, context[at + 2 : close]))
        opened = at > 0 and token_bytes(context[at - 1]).endswith(b"[")
        if opened and context[at + 1] == _EQUALS and digits.isdigit():
            found = int(digits), close + 1


def _character_length(lead: int) -> int:
    return 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1


def _unfinished_character(context: Sequence[int]) -> tuple[int, ...]:
    """The tokens at the end of the context that begin a character and do not complete it."""
    for length in range(1, min(3, len(context)) + 1):
        byte = lone_byte(context[-length])
        if byte is None or byte < 0x80:
            return ()
        if byte >= 0xC0:
            return tuple(context[-length:]) if _character_length(byte) > length else ()
    return ()


_TEXT_FIELDS = ("reasoning_content", "content")


def _remaining_deltas(
    deltas: Sequence[Mapping[str, Any]], already_sent: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The script after what was handed in: reasoning, content, and in that perhaps calls, the last of which
    may break off; all of the script if that is not its beginning. Who hands in content has had all reasoning,
    and who hands in calls all content."""
    content, calls = read_calls(already_sent.get("content") or "")
    known = {"reasoning_content": already_sent.get("reasoning_content") or "", "content": content}
    known |= {_argument_key(index): arguments for index, (_, arguments) in enumerate(calls)}
    over = [name for name, later in (("reasoning_content", content or calls), ("content", calls)) if later]
    known |= {name: "".join(delta.get(name) or "" for delta in deltas) for name in over if not known[name]}
    remaining: list[Mapping[str, Any]] = []
    for delta in deltas:
        rest = _without_known(delta, known, len(calls))
        if rest is None:
            return list(deltas)
        if rest:
            remaining.append(rest)
    return remaining


def _without_known(delta: Mapping[str, Any], known: dict[str, str], n_calls: int) -> dict[str, Any] | None:
    """What of a delta is new, and takes the rest off `known`; None if it is something else."""
    rest: dict[str, Any] = {}
    for name, value in delta.items():
        if name in _TEXT_FIELDS and value:
            text = _after(value, known, name)
            if text is None:
                return None
            rest |= {name: text} if text else {}
        elif name == "tool_calls":
            pieces = []
            for piece in value:
                function = piece.get("function") or {}
                text = _after(function.get("arguments") or "", known, _argument_key(piece.get("index", 0)))
                if text is None:
                    return None
                if piece.get("index", 0) >= n_calls:
                    pieces.append(piece)
                elif text:
                    pieces.append({"index": piece.get("index", 0), "function": {"arguments": text}})
            rest |= {name: pieces} if pieces else {}
        elif not any(known.values()):
            rest[name] = value
    return rest


def _after(text: str, known: dict[str, str], key: str) -> str | None:
    """What of a text is not known yet; None if it is another text."""
    old = known.get(key, "")
    if not text.startswith(old[: len(text)]):
        return None
    known[key] = old[len(text) :]
    return text[len(old) :]


def _argument_key(index: int) -> str:
    return f"arguments {index}"


def _delta_text(delta: Mapping[str, Any]) -> str:
    parts = [delta.get("reasoning_content") or "", delta.get("content") or ""]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(parts)
