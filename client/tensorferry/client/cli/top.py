"""`tensorferry top`: the status of a running server in a terminal, as its status page shows it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tensorferry.client.cli.parser import INTERRUPTED, CommandParser, seconds
from tensorferry.client.cli.top_view import StatusSamples, lines_of
from tensorferry.client.messages.printable import one_line

_DEFAULT = "http://127.0.0.1:8002"
_HOW = "check that it runs and was started with --metrics-port; its first line of output has the address of its metrics"
# The supported schema. New versions of the server may add fields without a new number.
_SCHEMA = 1
_MOST_BYTES = 64 << 20
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# Switch to the terminal's alternate screen without a cursor, and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _LINE_END, _REST = "\x1b[H", "\x1b[K", "\x1b[J"

Status = dict[str, Any]


class StatusError(Exception):
    """The status cannot be read; the message says what to do."""


def main(argv: Sequence[str]) -> int:
    """Show the status until q or Ctrl-C; return 1, after one line on stderr, if the first read fails.

    Ctrl-C before the status is shown returns 130.
    """
    parser = CommandParser(
        "top", "Show what a running server does: rates, latencies, queues, and its last batches. q ends it."
    )
    url_help = f"address of the server's metrics, as http://HOST:PORT or HOST:PORT (default: {_DEFAULT})"
    parser.add_argument("url", metavar="URL", nargs="?", help=url_help)
    same = "the same address as a flag, as in the other commands"
    parser.add_argument("--target", metavar="HOST:PORT", help=same)
    parser.add_argument("--model", metavar="NAME", help="show this model alone")
    between = "time between two samples (default: 1)"
    parser.add_argument("--interval", metavar="SECONDS", type=seconds(0.1, 3600), default=1.0, help=between)
    plain = "take two samples, print them as plain text, and end"
    parser.add_argument("--once", action="store_true", help=plain)
    arguments = parser.parse(argv)
    try:
        if arguments.url is not None and arguments.target is not None:
            parser.error("URL and --target are the same; give one of them")
        given = arguments.target if arguments.url is None else arguments.url
        url = status_url(_DEFAULT if given is None else given)
        samples = StatusSamples()
        samples.add(read(url))
        if arguments.model is not None and arguments.model not in samples.models:
            known = ", ".join(samples.models) or "none"
            raise StatusError(f"there is no model {arguments.model!r}; there are: {known}")
        if arguments.once or not sys.stdout.isatty():
            _once(url, samples, arguments)
            return 0
    except StatusError as error:
        print(f"tensorferry top: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):
        _watch(url, samples, arguments)
    return 0


def status_url(given: str) -> str:
    """Return the URL of the status, from a URL or HOST:PORT; raise StatusError for anything else."""
    try:
        parts = urlsplit(given if "://" in given else f"//{given}", scheme="http")
        port = parts.port
    except ValueError:
        port, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or (port is None and "://" not in given):
        raise StatusError(f"{given!r} is no address; give http://HOST:PORT or HOST:PORT of the metrics")
    return f"{parts.scheme}://{parts.netloc}/status.json"


def read(url: str, timeout: float = 5.0) -> Status:
    """Fetch the status of a server; raise StatusError if that fails."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            status = json.loads(response.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise StatusError(
                f"{url} does not exist: the server is not tensorferry, or an older version"
            ) from None
        raise StatusError(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        if _speaks_http2(url, timeout):
            raise StatusError(
                f"{url} is a gRPC port: give the port of the metrics, which the server has with --metrics-port and names "
                "in its first line of output"
            ) from None
        reason = getattr(error, "reason", None) or error
        raise StatusError(f"no server answers at {url} ({reason}): {_HOW}") from None
    except (RecursionError, ValueError):
        raise StatusError(f"{url} returns no status: give the metrics' port, not the one of gRPC") from None
    if not isinstance(status, dict) or status.get("schema") != _SCHEMA:
        raise StatusError(f"{url} returns no status that this version understands: it needs schema {_SCHEMA}")
    return status


def _speaks_http2(url: str, timeout: float) -> bool:
    """Return whether the port answers an HTTP/2 preface, as only a gRPC port does."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), timeout) as connection:
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(9)
    except OSError:
        return False
    # HTTP/2 servers begin with a SETTINGS frame, type 4.
    return len(answer) >= 4 and answer[3] == 4 and not answer.startswith(b"HTTP")


def _once(url: str, samples: StatusSamples, arguments: argparse.Namespace) -> None:
    """Take a second sample, because rates need two, and print the status."""
    time.sleep(arguments.interval)
    samples.add(read(url))
    # Lines are cut for terminals only.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    for line in lines_of(samples, width, arguments.model, blocks=_blocks()):
        print(line.rstrip())


def _blocks() -> str:
    """Return the character of bars, `#` if the terminal's encoding lacks blocks."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


def _watch(url: str, samples: StatusSamples, arguments: argparse.Namespace) -> None:
    problem = ""
    lost_since = 0.0
    with _screen() as keys:
        while True:
            size = shutil.get_terminal_size((100, 40))
            shown = lines_of(samples, size.columns, arguments.model, blocks=_blocks())
            if problem:
                ago = time.monotonic() - lost_since
                shown = [f"NO ANSWER for {ago:.0f} s, older figures below: {problem}"[: size.columns], *shown]
            lines = "\n".join(line + _LINE_END for line in shown[: size.lines])
            sys.stdout.write(_HOME + lines + _REST)
            sys.stdout.flush()
            if keys(arguments.interval) in ("q", "Q", "\x03"):
                return
            try:
                samples.add(read(url, timeout=2.0))
                problem = ""
            except StatusError as error:
                lost_since = lost_since if problem else time.monotonic()
                problem = one_line(str(error))


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[float], str]]:
    """Open the alternate screen; yield a function that waits for a key, given seconds.

    The function returns the key, or "" if none came. A resize of the window also ends the wait.
    """
    number = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(number) if number is not None else None
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    # A wakeup descriptor, because a signal just before the wait would not end the wait otherwise.
    waker = signal.set_wakeup_fd(wakes)
    handlers = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda received, frame: None),
        # Otherwise the process would end without leaving the alternate screen.
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda received, frame: sys.exit(128 + received)),
    }

    def key(seconds: float) -> str:
        waited = [woken] if number is None else [woken, number]
        ready, _, _ = select.select(waited, [], [], seconds)
        if woken in ready:
            os.read(woken, 4096)
        if number is not None and number in ready:
            return os.read(number, 1).decode(errors="replace")
        return ""

    try:
        if number is not None:
            tty.setcbreak(number)
        sys.stdout.write(_ENTER)
        yield key
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if number is not None and before is not None:
            termios.tcsetattr(number, termios.TCSADRAIN, before)
        for received, handler in handlers.items():
            signal.signal(received, handler)
        signal.set_wakeup_fd(waker)
        os.close(woken)
        os.close(wakes)
