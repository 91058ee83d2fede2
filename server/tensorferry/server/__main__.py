"""The command `tensorferry`: finds the module of a subcommand, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from tensorferry.server.cli.installed_versions import wrong_versions
from tensorferry.server.transport import grpc_environment

# Loaded by name, when asked for: the client's commands then need no server packages, and
# server and client stay strangers to each other.
_COMMANDS = {
    "serve": ("tensorferry.server.cli.serve", "main", "serve ONNX models over gRPC"),
    "config": ("tensorferry.server.cli.show_config", "main", "print a model's completed configuration"),
    "token": ("tensorferry.server.cli.make_token", "main", "make a bearer token for a caller"),
    "infer": ("tensorferry.client.cli.commands", "infer", "send one request to a running server"),
    "ready": ("tensorferry.client.cli.commands", "ready", "whether a running server takes requests"),
    "models": ("tensorferry.client.cli.commands", "models", "list a running server's models"),
    "describe": ("tensorferry.client.cli.commands", "describe", "show a model's inputs and outputs"),
    "top": ("tensorferry.client.cli.top", "main", "show what a running server does, in a terminal"),
}


def _usage() -> str:
    commands = "\n".join(f"  {name:<10}{what}" for name, (_, _, what) in _COMMANDS.items())
    return (
        f"usage: tensorferry [--version] COMMAND ...\n\n{commands}\n\ntensorferry COMMAND --help says more."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code; 2 for one that does not exist."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has left, as `head` does. Python itself would complain when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"tensorferry {version('tensorferry')}")
        return 0
    if arguments[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not arguments or arguments[0] not in _COMMANDS:
        wrong = f"unknown command {arguments[0]!r}\n" if arguments else ""
        print(wrong + _usage(), file=sys.stderr)
        return 2
    module, function, _ = _COMMANDS[arguments[0]]
    if arguments[0] == "serve":
        grpc_environment.prepare()
    try:
        command = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tensorferry"):
            raise
        print(
            f"tensorferry {arguments[0]}: the package {error.name} is missing; "
            "pip install 'tensorferry[cpu]', or [gpu], has what the server needs",
            file=sys.stderr,
        )
        return 1
    except Exception:
        # Generated code refuses versions of grpcio and protobuf that are too old for it.
        if not (complaints := list(wrong_versions())):
            raise
        print("\n".join(f"tensorferry {arguments[0]}: {one}" for one in complaints), file=sys.stderr)
        return 1
    return int(command(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
