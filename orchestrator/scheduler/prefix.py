"""What two prompts have in common, without their tokens.

A prompt is known by the chain of its blocks' checksums: entry *i* covers everything up to the end of block
*i*, so two prompts share as many blocks as their chains share entries. A wrong guess (a checksum that
collides, a template that renders equal messages differently) costs an estimate and nothing else: what is
really reused, the engine finds out by comparing tokens.
"""

from __future__ import annotations

Prefix = tuple[int, ...]


def overlap(left: Prefix, right: Prefix) -> int:
    """How many leading blocks are the same, in O(log n): chains that differ once differ ever after."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_tokens(prompt: Prefix, held: Prefix, prompt_tokens: int, kv_tokens: int) -> int:
    """About how many tokens of the KV a prompt could use.

    The KV was made by a prompt of `prompt_tokens` tokens with the chain `held`, and has `kv_tokens` in all.
    A prompt that contains all of that one most likely goes on with its reply as well.
    """
    blocks = overlap(prompt, held)
    if not blocks:
        return 0
    if blocks == len(held):
        return kv_tokens
    return min(kv_tokens, prompt_tokens * blocks // len(held))


def goes_on_from(prompt: Prefix, held: Prefix, prompt_tokens: int, kv_tokens: int) -> int:
    """The same, but 0 where less than half of the KV would be of use: that is another conversation's."""
    shared = shared_tokens(prompt, held, prompt_tokens, kv_tokens)
    return shared if 2 * shared >= kv_tokens else 0
