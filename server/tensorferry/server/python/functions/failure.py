"""Failures of Python functions as text, which can be sent by the process that runs the function."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tensorferry.server.errors import truncate
from tensorferry.serving.errors import InvalidInput

# The longest text of an InvalidInput, which the client gets, in characters.
_MAX_PUBLIC_CHARACTERS = 1000
# The most of an exception's text and of its traceback in the log, in characters.
_MAX_REASON_CHARACTERS = 500
_MAX_DETAILS_CHARACTERS = 16_000

_OUR_FILES = f"{Path(__file__).parents[2]}{os.sep}"


class Failure(NamedTuple):
    """An exception of a function, as text. `refusal` is the text of an InvalidInput, else None.

    `reason` is the exception's type and text, `details` its traceback. Both are for the log only. `hint` is what to change
    if the function wrote to a read-only array, which `reason` says, too; else empty.
    """

    refusal: str | None
    reason: str
    details: str
    hint: str = ""


def describe(error: BaseException) -> Failure:
    """Return the description of an exception that a function raised. It keeps no reference to the exception."""
    text = text_of(error)
    refusal = None
    if isinstance(error, InvalidInput):
        # A lone surrogate, from bytes decoded by "surrogateescape", has no UTF-8, and a status must be UTF-8.
        refusal = truncate(text.encode(errors="replace").decode(), _MAX_PUBLIC_CHARACTERS)
    reason = truncate(
        f"{type(error).__name__}: {text}" if text else type(error).__name__, _MAX_REASON_CHARACTERS
    )
    hint = _hint(error, text)
    return Failure(refusal, f"{reason}; {hint}" if hint else reason, _shortened(traceback_text(error)), hint)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, which may be of the user's class."""
    try:
        return str.__str__(str(error))
    except Exception:
        return "(its __str__ raises an exception)"


def traceback_text(error: BaseException) -> str:
    """Return the traceback of a user's code as Python prints it, from the first frame that is not the server's."""
    return "".join(traceback.format_exception(type(error), error, _users_part(error))).rstrip()


def _users_part(error: BaseException) -> TracebackType | None:
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith(
        (_OUR_FILES, "<frozen importlib")
    ):
        begin = begin.tb_next
    return begin


def _hint(error: BaseException, text: str) -> str:
    """Return what to change if numpy, or compiled code, refused to write to a read-only array; "" for other errors."""
    # Such as "output array is read-only", "cannot modify read-only memory", and "readonly" of Numba.
    if not isinstance(error, (ValueError, TypeError)) or not re.search(r"read-?only|WRITEABLE flag", text):
        return ""
    begin = _users_part(error)
    if begin is None:
        return ""
    # The last line of the user's files, because numpy and the standard library may have frames behind it.
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(begin)]
    folder, separator, _ = lines[0][0].rpartition(os.sep)
    own = f"{folder}{separator}"
    file, line = [
        each for each in lines if each[0].startswith(own) and "site-packages" not in each[0].removeprefix(own)
    ][-1]
    source = linecache.getline(file, line).strip()
    if source.startswith("raise "):
        return ""
    return (
        f"{Path(file).name}:{line}: {source!r} writes to a read-only array; inputs are read-only: copy what you change, such as "
        "x = x / 255 in place of x /= 255"
    )


def _shortened(text: str) -> str:
    """Return a traceback without its middle if it is too long: the end has the exception, the beginning the call."""
    if len(text) <= _MAX_DETAILS_CHARACTERS:
        return text
    half = _MAX_DETAILS_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
