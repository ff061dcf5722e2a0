"""Keys and what the configuration keeps of them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import parse_config
from orchestrator.keys import KEY_BYTES, KEY_PREFIX, digest, digest_of, hash_key, is_hash, new_key, same


def test_a_key_is_random_and_no_two_are_alike() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    # 32 bytes in base64 without padding.
    assert {len(key) for key in keys} == {len(KEY_PREFIX) + 43}
    assert KEY_BYTES * 8 == 256


@given(st.text())
def test_the_hash_is_the_plain_sha256(key: str) -> None:
    hashed = hash_key(key)
    assert hashed == "sha256-" + hashlib.sha256(key.encode()).hexdigest()
    assert is_hash(hashed)
    assert same(digest_of(hashed), digest(key.encode()))
    assert not same(digest_of(hashed), digest(key.encode() + b"x"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256-",
        "sha256-" + "a" * 63,
        "sha256-" + "A" * 64,
        "sha512-" + "a" * 64,
        "a" * 64,
        None,
        5,
        "sk-swarm-" + "a" * 43,
    ],
)
def test_what_is_no_hash(text: object) -> None:
    assert not is_hash(text)
    with pytest.raises(ValueError, match="not the hash of a key"):
        digest_of(str(text))


def test_a_hash_is_a_plain_word_of_yaml() -> None:
    hashed = hash_key("k")
    text = f"backends: [{{name: b, url: http://h}}]\nserver: {{admin_key: {hash_key('o')}}}\nagents:\n"
    config = parse_config(f"{text}  a: {{key: {hashed}}}\n  b:\n    key: {hash_key('l')}  # comment\n")
    assert config.agents["a"].key == hashed
    assert config.agents["b"].key == hash_key("l")
    assert config.server.admin_key == hash_key("o")
