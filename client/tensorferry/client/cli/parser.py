"""Parser for the arguments of the shell commands, which reports an error in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from tensorferry.client.messages.printable import one_line

# Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, with the nearest known flag for an unknown one."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"tensorferry {command}", description=description, allow_abbrev=False)

    def flags(self, title: str, texts: Mapping[str, str], *, exclusive: bool = False) -> Callable[..., Any]:
        """Begin a group of flags; return a function that adds one, with its text of `texts` as help.

        Of `exclusive` flags at most one may be given.
        """
        group: argparse._ActionsContainer = self.add_argument_group(title)
        if exclusive:
            group = group.add_mutually_exclusive_group()
        return lambda flag, **options: group.add_argument(flag, help=texts[flag], **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the arguments; exit with code 2 if they are wrong."""
        arguments, unknown = self.parse_known_args(argv)
        for text in unknown:
            self.error(self._unknown(text))
        return arguments

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (--help shows all options)\n")

    def _unknown(self, text: str) -> str:
        if not text.startswith("-"):
            return f"unexpected argument {text!r}"
        flag, _, _ = text.partition("=")
        known = [name for action in self._actions for name in action.option_strings]
        near = [name for name in known if name.startswith(flag)] or get_close_matches(flag, known, 1)
        return f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "")


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option that takes seconds within bounds."""

    def checked(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected seconds from {least:g} to {most:g}, got {text!r}")
        return value

    return checked


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number within bounds."""

    def checked(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return checked
