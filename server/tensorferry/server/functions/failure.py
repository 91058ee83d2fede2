"""Failures of Python functions as text, which can be sent by the process that runs the function."""

from __future__ import annotations

import os
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

_OUR_FILES = f"{Path(__file__).parents[1]}{os.sep}"


class Failure(NamedTuple):
    """An exception of a function, as text. `refusal` is the text of an InvalidInput, else None.

    `reason` is the exception's type and text, `details` its traceback. Both are for the log only.
    """

    refusal: str | None
    reason: str
    details: str


def describe(error: BaseException) -> Failure:
    """Return the description of an exception that a function raised. It keeps no reference to the exception."""
    try:
        text = str(error)
    except Exception:
        text = "(its __str__ raises an exception)"
    refusal = None
    if isinstance(error, InvalidInput):
        # A lone surrogate, from bytes decoded by "surrogateescape", has no UTF-8, and a status must be UTF-8.
        refusal = truncate(text.encode(errors="replace").decode(), _MAX_PUBLIC_CHARACTERS)
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(refusal, truncate(reason, _MAX_REASON_CHARACTERS), _shortened(traceback_text(error)))


def traceback_text(error: BaseException) -> str:
    """Return the traceback of a user's code as Python prints it, from the first frame that is not the server's."""
    begin: TracebackType | None = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith(
        (_OUR_FILES, "<frozen importlib")
    ):
        begin = begin.tb_next
    return "".join(traceback.format_exception(type(error), error, begin)).rstrip()


def _shortened(text: str) -> str:
    """Return a traceback without its middle if it is too long: the end has the exception, the beginning the call."""
    if len(text) <= _MAX_DETAILS_CHARACTERS:
        return text
    half = _MAX_DETAILS_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
