"""Standard input, output and errors of a process, which may be closed, full, or read by nobody."""

from __future__ import annotations

import logging
import os
import sys

_log = logging.getLogger("tensorferry.server")


def open_missing() -> None:
    """Open each standard stream that is closed, so that no other file gets its number, to which C libraries write."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)


def print_line(line: str) -> None:
    """Print a line at once, or log why that fails: the disk is full, or what reads the output has ended."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("standard output cannot be written to, and is discarded: %s", error)
        discard_output()


def discard_output() -> None:
    """Discard what is printed from now on, and what could not be written, for which Python would fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
