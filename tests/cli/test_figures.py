"""Figures as they are shown."""

from __future__ import annotations

import pytest

from orchestrator.cli.columns import fit
from orchestrator.cli.figures import clock, duration, ids, plain, plural, short_count, size


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 us"),
        (0.00085, "850 us"),
        (0.0009999, "1.0 ms"),
        (0.0253, "25.3 ms"),
        (0.09999, "100 ms"),
        (0.85, "850 ms"),
        (0.9999, "1.00 s"),
        (4.912, "4.91 s"),
        (59.99, "1 min 00 s"),
        (125.4, "2 min 05 s"),
        (11_220, "3 h 07 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1023, "1.00 KiB"), (47_396_659, "45.2 MiB"), (1 << 30, "1.00 GiB")],
)
def test_size(n_bytes: int, shown: str) -> None:
    assert size(n_bytes) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (24_576, "24.6k"),
        (99_949, "99.9k"),
        (99_950, "100k"),
        (999_499, "999k"),
        (999_500, "1.0M"),
        (2_500_000_000, "2,500M"),
    ],
)
def test_short_count(number: int, shown: str) -> None:
    assert short_count(number) == shown


def test_small_ones() -> None:
    assert clock(65.9) == "1:05"
    assert ids([]) == ""
    assert ids([2, 5, 6, 7, 9]) == "2, 5-7, 9"
    assert plural(1, "turn") == "1 turn"
    assert plural(1200, "turn") == "1,200 turns"
    assert plain("a\tb\x1b[1m") == "a b [1m"


def test_fit_counts_cells_not_characters() -> None:
    assert fit("abc", 5) == "abc  "
    assert fit("abc", 5, "right") == "  abc"
    assert fit("abcdef", 4) == "abc…"
    assert fit("日本語", 5) == "日本…"
