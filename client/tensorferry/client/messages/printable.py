"""Text of servers and models for a terminal. Pure functions."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text without characters that control a terminal or break a line: each is an escape such as \\x1b."""
    return text if text.isprintable() else "".join(map(_visible, text))


def one_line(text: str) -> str:
    """Return a text of several lines on one line, printable."""
    return printable(" ".join(text.split()))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
