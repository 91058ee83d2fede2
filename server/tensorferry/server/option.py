"""What an option is: its names, and what its value looks like as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorferry.server.config import ConfigError

# Thirty years: timers refuse what is some times longer.
_MOST_SECONDS = 1_000_000_000
SECONDS = f"a number of seconds from 0 to {_MOST_SECONDS}"
MILLISECONDS = f"a number of milliseconds from 0 to {_MOST_SECONDS}000"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a flag, an environment variable and a key of the file by the same name.

    With a `separator` the flag may be given several times, and the file may have a list: their
    texts are one, with that between. The flag of a `switch` may stand alone, which means true.
    """

    flag: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    help: str
    separator: str = ""
    switch: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "TENSORFERRY_" + self.flag.replace("-", "_").upper()

    def value(self, text: str, source: str) -> Any:
        """The value in a text; ConfigError names where it stood (`source`)."""
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{source} is {text!r}; it must be {self.allowed}") from None


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Integers within bounds."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ValueError
        return value

    return parse


def number(text: str) -> float:
    """A number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def positive(text: str) -> float:
    """A number above 0."""
    if not (value := number(text)):
        raise ValueError
    return value


def seconds(text: str) -> float:
    """A number of seconds from 0 on that the system's timers take."""
    return _bounded(number(text))


def milliseconds(text: str) -> float:
    """As seconds, a number of milliseconds from 0 on, likewise."""
    return _bounded(number(text) / 1e3)


def _bounded(seconds: float) -> float:
    if seconds > _MOST_SECONDS:
        raise ValueError
    return seconds


def path(text: str) -> Path:
    """A path that is not blank."""
    if not text.strip():
        raise ValueError
    return Path(text)


def truth(text: str) -> bool:
    """True or false, in any case."""
    return one_of("true", "false")(text) == "true"


def size(text: str) -> int:
    """Bytes, perhaps in KiB, MiB or GiB."""
    match = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError
    return int(match[1]) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[2]]


def one_of(*values: str) -> Callable[[str], str]:
    """One of these words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    return parse


def switch(flag: str, field: str, help: str) -> Option:
    """An option that is on or off."""
    return Option(flag, field, truth, "true or false", help, switch=True)
