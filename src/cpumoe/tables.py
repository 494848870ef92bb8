"""Tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: int = 0) -> list[str]:
    """One line per row, with every column as wide as its widest cell and two spaces between columns.

    Args:
        rows: the cells; a title line is a row like any other.
        right: numbers of the columns that are aligned to the right, as numbers are.
        indent: spaces in front of every line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            " " * indent
            + "  ".join(
                cell.rjust(width) if number in right else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in rows
    ]


def size_text(count: float) -> str:
    """A number of bytes for people, with a unit."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count:.0f} B"
