"""Keys: how they are made, what the configuration keeps of them, and how one is compared.

A key is 256 random bits, made by this program and never chosen by a person. So its plain SHA-256 is safe to
keep: the slow, salted hashes that passwords need make guessing expensive, and of 2**256 keys none can be
guessed at any speed. The plain hash costs a request a microsecond, and the configuration holds no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

# What secret scanners and log filters can find; some clients take only keys that start with sk-.
KEY_PREFIX = "sk-swarm-"
KEY_BYTES = 32
# The kind of hash comes first, so that another one can be told from it.
HASH_PREFIX = "sha256-"
#: A key's hash as the configuration has it: plain text wherever YAML allows a word.
HASH_PATTERN = rf"{HASH_PREFIX}[0-9a-f]{{64}}"


def new_key() -> str:
    """A key that nobody has."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """What the configuration keeps of a key."""
    return HASH_PREFIX + digest(key.encode()).hex()


def is_hash(text: object) -> bool:
    """Whether this is what `hash_key` returns."""
    return isinstance(text, str) and re.fullmatch(HASH_PATTERN, text) is not None


def digest(key: bytes) -> bytes:
    """The hash of a key as it was sent."""
    return hashlib.sha256(key).digest()


def digest_of(hashed: str) -> bytes:
    """The hash that the configuration has, as `digest` returns it. Raises ValueError for any other text."""
    if not is_hash(hashed):
        raise ValueError("not the hash of a key")
    return bytes.fromhex(hashed.removeprefix(HASH_PREFIX))


def same(one: bytes, other: bytes) -> bool:
    """Whether two digests are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)
