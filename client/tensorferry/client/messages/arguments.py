"""Argument checks: each returns the value, or raises `InvalidInput`. Pure and thread-safe."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.client.errors import InvalidInput


def shown(value: object) -> str:
    """Return a short form of a value, with its type, for an error message."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def quoted(names: Iterable[str]) -> str:
    """Return names for an error message, "none" if there are none."""
    return ", ".join(map(repr, names)) or "none"


def text(subject: str, value: object, *, expected: str = "a str", change: str = "") -> str:
    """Check a str that UTF-8 can encode."""
    if not isinstance(value, str):
        if not change:
            change = f"write {str(value)!r}" if isinstance(value, int) else "give it as a str"
        raise InvalidInput(subject, expected, shown(value), change)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            subject,
            "a str that UTF-8 can encode",
            shown(value),
            f"remove the lone surrogates ({error.reason})",
        ) from None
    return value


def model(name: object, version: object) -> None:
    """Check the name and version of a model."""
    if not text("the model's name", name, change="give the name as a str, such as 'digits'"):
        raise InvalidInput("the model's name", "a str that is not empty", "''", "name a model of the server")
    text("the model's version", version, expected="a str ('' for the server's choice)")


def names(subject: str, value: object) -> None:
    """Check None, a sequence of str, or a mapping whose keys are str."""
    if value is None:
        return
    if isinstance(value, Mapping):
        mapping(subject, value, "")
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        change = f"write [{value!r}]" if isinstance(value, str) else "give a list of names, or None for all"
        raise InvalidInput(subject, "a list of str, or None", shown(value), change)
    for one in value:
        text(f"each of {subject}", one)


def mapping(subject: str, value: object, change: str) -> Mapping[Any, Any]:
    """Check a mapping whose keys are str."""
    if not isinstance(value, Mapping):
        raise InvalidInput(subject, "a dict", shown(value), change)
    for key in value:
        text(f"each name in {subject}", key)
    return value


def content(subject: str, expected: str, file: Any) -> bytes:
    """Return the content of a file, by its name; raise InvalidInput if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        change = "name a file that can be read"
        raise InvalidInput(subject, expected, f"{file!r} ({reason})", change) from None


def integer(subject: str, value: object, least: int, most: int) -> int:
    """Check an int within bounds, numpy's included, bool excluded."""
    number = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        try:
            number = int(value.__index__())
        except TypeError:  # an array, for instance
            number = None
    if number is None or not least <= number <= most:
        raise InvalidInput(subject, f"an int from {least} to {most}", shown(value), "give one of these")
    return number


def pairs(subject: str, value: object, example: str) -> list[tuple[Any, Any]]:
    """Check a sequence of pairs whose first element is a str."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, (list, tuple)):
        for pair in value:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InvalidInput(
                    f"each of {subject}", "a pair of name and value", shown(pair), f"write {example}"
                )
            found.append((pair[0], pair[1]))
        return found
    raise InvalidInput(subject, "a list of pairs of name and value", shown(value), f"write {example}")
