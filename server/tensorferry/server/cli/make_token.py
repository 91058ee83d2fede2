"""`tensorferry token`: makes a bearer token, and the line by which a server knows it."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence

from tensorferry.server.config.flags import CommandParser
from tensorferry.server.identity import INFER, ROLES
from tensorferry.server.names import NAME
from tensorferry.server.security.credential_files import TOKEN, parse_roles

# By which those who look for secrets in logs and repositories find it.
_PREFIX = "tensorferry_"
_RANDOM_BYTES = 32


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tensorferry token",
        description="Makes a random bearer token for a caller of a server that is started with --auth-tokens FILE. The file "
        "has only its hash: the token itself is shown once, and kept nowhere.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="NAME", type=_name, help="what the caller is called; several tokens may have it"
    )
    parser.add_argument(
        "--roles",
        metavar="ROLES",
        type=_roles,
        default=INFER,
        help=f"{', '.join(sorted(ROLES))}, with commas between (default: %(default)s)",
    )
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="add the line to this file, made if it is missing, and print the token alone (default: print both)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """0 when it is made, 1 when the file cannot be written, 2 for bad arguments."""
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
        whole = size == 0
        if size:
            file.seek(size - 1)
            whole = file.read(1) == b"\n"
        # One write: a server that reads at this moment sees all of the line, or none.
        file.write((line if whole else f"\n{line}").encode() + b"\n")


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a name starts with a letter or digit, goes on with these and '.', '_', '-', and has at most 128 "
            "characters"
        )
    return text


def _roles(text: str) -> str:
    try:
        return ",".join(sorted(parse_roles(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: there are {' and '.join(sorted(ROLES))}, with a comma between"
        ) from None
