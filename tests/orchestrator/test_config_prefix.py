"""`stable_prefix` in the configuration: what is allowed, and each mistake in one line."""

from __future__ import annotations

import pytest

from orchestrator.config import Config, ConfigError, parse_config


def parse(value: str) -> Config:
    return parse_config(
        f'backends: [{{name: a, url: "http://x:1"}}]\nagents:\n  editor:\n    stable_prefix: {value}\n'
    )


def test_default_is_no_rule() -> None:
    for value in ("", "null", "{}", "{pin: null}"):
        rules = parse(value).agents["editor"].stable_prefix
        assert (rules.pin, rules.move) == ((), ())


def test_patterns() -> None:
    rules = parse('{pin: ["x-billing:*"], move: ["*Time: *", "20*-*-* *:*"]}').agents["editor"].stable_prefix
    assert (rules.pin, rules.move) == (("x-billing:*",), ("*Time: *", "20*-*-* *:*"))


@pytest.mark.parametrize(
    "pattern", ["*", "***", "a*b*c", " x-billing:*", "x-billing:* ", "x\\nxxxx", "", "x" * 201]
)
def test_a_pattern_that_matches_too_much_or_nothing(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f'{{pin: ["{pattern}"]}}')
    [problem] = str(caught.value).splitlines()
    assert problem.startswith("config.yaml:4: agents.editor.stable_prefix.pin[0]: ")
    assert "is not the text of a line with * for what changes" in problem


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{pins: []}", "unknown key; did you mean pin? Allowed here: pin, move"),
        ("{pin: x-billing*}", "is not a list"),
        ("{move: [17000]}", "put it in quotes"),
        ("[x-billing*]", "is not a mapping with keys of pin, move"),
        (f"{{move: [{', '.join(['abcd*'] * 17)}]}}", "at most 16 items"),
    ],
)
def test_mistakes(value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    [problem] = str(caught.value).splitlines()
    assert said in problem
