"""Tables whose rows never wrap: columns are as wide as their content, and the dispensable ones go first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.cells import cell_len, set_cell_size

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Column(Generic[_Row]):
    """The higher `drop`, the sooner it goes where the width is short; 0 stays. `most` cells at most."""

    drop: int
    title: str
    justify: Literal["left", "right"]
    most: int
    text: Callable[[_Row], str]

    def cell(self, row: _Row, width: int) -> str:
        """A row's text in exactly this width."""
        return fit(self.text(row), width, self.justify)


def layout(
    columns: Sequence[Column[_Row]], rows: Sequence[_Row], width: int, spare: int = 0
) -> list[tuple[Column[_Row], int]]:
    """The columns that fit and their widths; `spare` cells stay free for what follows them."""
    fitting = [
        (column, min(column.most, max(map(cell_len, (column.title, *map(column.text, rows))))))
        for column in columns
    ]
    while used(fitting) + spare > width:
        first = max(fitting, key=lambda pair: pair[0].drop)
        if first[0].drop == 0:
            break
        fitting.remove(first)
    return fitting


def used(fitting: Sequence[tuple[Column[_Row], int]]) -> int:
    """The cells that columns take, each with the blank after it."""
    return sum(width + 1 for _, width in fitting)


def fit(text: str, width: int, justify: Literal["left", "right"] = "left") -> str:
    """Text in exactly this width, shortened with an ellipsis."""
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, width - 1) + "…"
    return " " * missing + text if justify == "right" else text + " " * missing
