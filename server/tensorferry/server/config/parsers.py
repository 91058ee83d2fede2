"""Parsers of option values: text to a typed value, and back for help and documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

_T_co = TypeVar("_T_co", covariant=True)

# Thirty years: the system's timers refuse values a few times larger.
_MAX_SECONDS = 1_000_000_000


def _format(value: Any) -> str | None:
    """Return the text of a value; None for a value that stands for "not set"."""
    if value is None or value == ():
        return None
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Parser(Generic[_T_co]):
    """Conversion between an option's text and its value.

    `parse` raises ValueError for a text that `allowed` excludes. `format` is the inverse for the default, in help and
    documentation; it returns None if there is nothing to show. `metavar` stands for the value in `--help`.
    A `switch` is an option whose flag can be given without a value, which means true.
    """

    parse: Callable[[str], _T_co]
    allowed: str
    type: str
    metavar: str
    unit: str = ""
    format: Callable[[Any], str | None] = _format
    switch: bool = False


def _require_between(value: int, least: int, most: int | None) -> None:
    """ValueError if the value is not within these bounds, both included."""
    if value < least or (most is not None and value > most):
        raise ValueError


def _bounds(least: int, most: int | None) -> str:
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def integer(least: int, most: int | None = None, *, unit: str = "", metavar: str = "N") -> Parser[int]:
    """Return a parser of integers from `least` to `most`, both included."""

    def parse(text: str) -> int:
        value = int(text)
        _require_between(value, least, most)
        return value

    return Parser(parse, f"an integer {_bounds(least, most)}", "integer", metavar, unit)


def integer_or(word: str, least: int, most: int, *, unit: str = "", metavar: str = "N") -> Parser[int | None]:
    """Return a parser of integers from `least` to `most`, both included, or a word, which is None."""
    of_integers = integer(least, most)
    return Parser(
        lambda text: None if text.lower() == word else of_integers.parse(text),
        f"{word} or an integer from {least} to {most}",
        f"integer, or {word}",
        f"{metavar}|{word}",
        unit,
        lambda value: word if value is None else str(value),
    )


port_or_none = integer_or("none", 0, 65535, metavar="PORT")


def integers(unit: str = "") -> Parser[tuple[int, ...]]:
    """Return a parser of comma-separated integers of at least 1."""
    return Parser(
        parse_integers, "integers of at least 1, separated by commas", "list of integers", "N,N,...", unit
    )


def parse_integers(text: str) -> tuple[int, ...]:
    """Return comma-separated integers of at least 1, with or without brackets around them."""
    values = tuple(int(part) for part in text.strip("[] ").split(","))
    if min(values) < 1:
        raise ValueError
    return values


def parse_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Return comma-separated pairs NAME=VALUE; ValueError for a name that is missing or occurs twice."""
    values: dict[str, str] = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not name or not equals or name in values:
            raise ValueError
        values[name] = value
    return tuple(values.items())


def _number_parser(
    *, positive: bool = False, most: float = sys.float_info.max, divisor: float = 1.0
) -> Callable[[str], float]:
    """Return a function that parses a number and divides it; the result must be from 0, or above it, to `most`."""

    def parse(text: str) -> float:
        value = float(text) / divisor
        if not 0 <= value <= most or (positive and value == 0):
            raise ValueError
        return value

    return parse


def number(unit: str) -> Parser[float]:
    """Return a parser of numbers of at least 0."""
    return Parser(_number_parser(), "a number of at least 0", "number", "NUMBER", unit)


positive_number = Parser(_number_parser(positive=True), "a number above 0", "number", "NUMBER")
seconds = Parser(
    _number_parser(most=_MAX_SECONDS),
    f"a number of seconds from 0 to {_MAX_SECONDS}",
    "number",
    "SECONDS",
    "seconds",
)
positive_seconds = Parser(
    _number_parser(positive=True, most=_MAX_SECONDS),
    f"a number of seconds above 0 and at most {_MAX_SECONDS}",
    "number",
    "SECONDS",
    "seconds",
)
# The value is in seconds, the text in milliseconds.
milliseconds = Parser(
    _number_parser(most=_MAX_SECONDS, divisor=1e3),
    f"a number of milliseconds from 0 to {_MAX_SECONDS}000",
    "number",
    "MILLISECONDS",
    "milliseconds",
    format=lambda value: f"{value * 1e3:g}",
)

_SIZE_UNITS = {"GiB": 30, "MiB": 20, "KiB": 10, "": 0}


def size(least: int = 1, most: int | None = None) -> Parser[int]:
    """Return a parser of sizes in bytes from `least` to `most`, both included; KiB, MiB and GiB are understood."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", text.strip())
        if match is None:
            raise ValueError
        value = int(match[1]) << _SIZE_UNITS[match[2]]
        _require_between(value, least, most)
        return value

    return Parser(
        parse,
        f"a number of bytes {_bounds(least, most)}, or a number with KiB, MiB or GiB",
        "size",
        "SIZE",
        "bytes",
        format=_format_size,
    )


def _format_size(value: int | None) -> str | None:
    if not value:
        return _format(value)
    unit = next(unit for unit, shift in _SIZE_UNITS.items() if value % (1 << shift) == 0)
    return f"{value >> _SIZE_UNITS[unit]}{unit}"


def _parse_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


switch = Parser(
    _parse_boolean,
    "true or false",
    "switch",
    "[true|false]",
    format=lambda value: str(value).lower(),
    switch=True,
)


def one_of(*values: str) -> Parser[str]:
    """Return a parser of one of these lower-case words; upper case is accepted, too."""

    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    metavar = "|".join(values)
    return Parser(parse, f"{', '.join(values[:-1])} or {values[-1]}", metavar, metavar)


def parse_path(text: str) -> Path:
    """Return a path; ValueError for one that the system cannot have."""
    if not text.strip() or "\0" in text:
        raise ValueError
    return Path(text)


path = Parser(parse_path, "a path", "path", "PATH")


def _parse_host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", text):
        raise ValueError
    return text


host_name = Parser(_parse_host, "an address or host name", "address", "HOST")
