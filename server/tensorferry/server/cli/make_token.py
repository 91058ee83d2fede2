"""`tensorferry token`: a new bearer token, and its line for the --auth-tokens file."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence

from tensorferry.server.config.flags import CommandParser
from tensorferry.server.identity import INFER, ROLES
from tensorferry.server.names import NAME, NAME_RULE
from tensorferry.server.security.credential_files import TOKEN, parse_roles

# A fixed prefix, so that scanners find the token in logs and repositories.
_PREFIX = "tensorferry_"
_RANDOM_BYTES = 32


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tensorferry token",
        description="Make a random bearer token for a client of a server with --auth-tokens FILE. The file has only the hash of "
        "the token; the token is printed once and stored nowhere.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="NAME", type=_name, help="name of the client; several tokens can have the same name"
    )
    parser.add_argument(
        "--roles",
        metavar="ROLES",
        type=_roles,
        default=INFER,
        help=f"{', '.join(sorted(ROLES))}, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="append the line to this file, which is created if needed, and print only the token (default: print both)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Return 0 if the token is made, 1 if the file cannot be written, 2 for bad arguments."""
    arguments = _parser().parse_args(argv)
    token = f"{_PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"
    line = f"{arguments.name} {arguments.roles} {TOKEN}{hashlib.sha256(token.encode()).hexdigest()}"
    if arguments.file is None:
        print(f"token, for the client:           {token}\nline, for the --auth-tokens file: {line}")
        return 0
    try:
        _add(arguments.file, line)
    except OSError as error:
        print(f"tensorferry token: {arguments.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(token)
    return 0


def _add(path: str, line: str) -> None:
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        complete = size == 0
        if size:
            file.seek(size - 1)
            complete = file.read(1) == b"\n"
        # One write, so that a server that reads the file now gets the whole line or none of it.
        file.write((line if complete else f"\n{line}").encode() + b"\n")


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: {NAME_RULE}")
    return text


def _roles(text: str) -> str:
    try:
        return ",".join(sorted(parse_roles(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the roles are {' and '.join(sorted(ROLES))}, separated by a comma"
        ) from None
