"""What an option is: its names, and what its value looks like as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorferry.server.config.server_config import ConfigError

# Thirty years: timers refuse what is some times longer.
_MOST_SECONDS = 1_000_000_000
SECONDS = f"a number of seconds from 0 to {_MOST_SECONDS}"
MILLISECONDS = f"a number of milliseconds from 0 to {_MOST_SECONDS}000"


# How `--help` shows values, by the end of a flag or the beginning of what is allowed.
_FORMS = {"-seconds": "SECONDS", "-ms": "MILLISECONDS"}
_FORMS_OF_KINDS = {
    "an integer": "N",
    "integers": "N,N,...",
    "a number of bytes": "SIZE",
    "a number": "NUMBER",
    "a path": "PATH",
    "an address": "HOST",
    "names": "NAME,...",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a flag, an environment variable and a key of the file by the same name.

    With a `separator` the flag may be given several times, and the file may have a list: their
    texts are one, with that between. The flag of a `switch` may stand alone, which means true, and has an opposite,
    --no-FLAG. `--help` shows the value as `form`, or as its kind suggests.
    """

    flag: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    help: str
    separator: str = ""
    switch: bool = False
    form: str = ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "TENSORFERRY_" + self.flag.replace("-", "_").upper()

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        if self.form:
            return self.form
        if isinstance(self.parse, OneOf):
            return "|".join(self.parse.values)
        if self.switch:
            return "[true|false]"
        for end, form in _FORMS.items():
            if self.flag.endswith(end):
                return form
        found = (form for start, form in _FORMS_OF_KINDS.items() if self.allowed.startswith(start))
        return next(found, "VALUE")

    def takes(self, text: str) -> bool:
        """Whether this is a value of it."""
        try:
            self.parse(text)
        except ValueError:
            return False
        return True

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


@dataclass(frozen=True, slots=True)
class OneOf:
    """Parses one of these words, in any case."""

    values: tuple[str, ...]

    def __call__(self, text: str) -> str:
        """The word in lower case."""
        if text.lower() not in self.values:
            raise ValueError
        return text.lower()


def one_of(*values: str) -> OneOf:
    """One of these words, in any case."""
    return OneOf(values)


def switch(flag: str, field: str, help: str) -> Option:
    """An option that is on or off."""
    return Option(flag, field, truth, "true or false", help, switch=True)
