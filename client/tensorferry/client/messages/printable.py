"""Text of servers and models for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Return a text without characters that control a terminal or break a line: each is an escape such as \\x1b."""
    return text if text.isprintable() else "".join(map(_visible, text))


def one_line(text: str) -> str:
    """Return a text of several lines on one line, printable."""
    return printable(" ".join(text.split()))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def aligned(lines: Sequence[tuple[str, ...]], left: Sequence[int] = ()) -> list[str]:
    """Return lines of cells in columns; those of `left` are aligned to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
