"""Figures and foreign text as they are shown."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(text: object) -> str:
    """Text from elsewhere in one line without control characters: it must not steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in str(text))


def size(n_bytes: int) -> str:
    """Bytes with three significant digits, as `45.2 MiB`."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def count(number: int) -> str:
    return f"{number:,}"


def short_count(number: int) -> str:
    """A count with at most three digits, as `812`, `5.2k`, `24.6k` or `1.3M`."""
    if number < 1000:
        return str(number)
    value, unit = (number / 1e3, "k") if number < 999_500 else (number / 1e6, "M")
    return f"{value:.1f}{unit}" if value < 99.95 else f"{value:,.0f}{unit}"


def duration(seconds: float) -> str:
    """Seconds as `850 us`, `25.3 ms`, `4.91 s`, `2 min 05 s` or `3 h 07 min`, with about three digits."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 99.95 else f"{milliseconds:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def clock(seconds: float) -> str:
    """A stopwatch, as `1:05`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def ids(numbers: list[int]) -> str:
    """Ascending numbers with runs drawn together, as `2, 5-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
