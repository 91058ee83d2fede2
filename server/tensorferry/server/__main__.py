"""The command `tensorferry`: dispatch to the module of a subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

from tensorferry.server.system import malloc
from tensorferry.server.system.installed_versions import imported
from tensorferry.server.system.standard_streams import discard_output, open_missing
from tensorferry.server.transport import grpc_environment

# Module, function and description of each subcommand. A module is imported by name when it is needed, so that the client's
# commands work without the server's packages, and server and client do not import each other.
_COMMANDS = {
    "serve": ("tensorferry.server.cli.serve", "main", "serve ONNX models and Python functions"),
    "inspect": (
        "tensorferry.server.cli.inspect",
        "main",
        "would a model batch, what to change if not, and what batches take",
    ),
    "config": ("tensorferry.server.cli.show_config", "main", "print a model's completed configuration"),
    "token": ("tensorferry.server.cli.make_token", "main", "make a bearer token for a caller"),
    "infer": ("tensorferry.client.cli.infer", "main", "send one request to a running server"),
    "ready": ("tensorferry.client.cli.commands", "ready", "check whether a running server accepts requests"),
    "models": ("tensorferry.client.cli.commands", "models", "list a running server's models"),
    "describe": ("tensorferry.client.cli.commands", "describe", "show a model's inputs and outputs"),
    "bench": ("tensorferry.client.cli.bench", "main", "measure a running server under load"),
    "top": ("tensorferry.client.cli.top", "main", "show the activity of a running server, in the terminal"),
}


def _usage() -> str:
    commands = "\n".join(f"  {name:<10}{description}" for name, (_, _, description) in _COMMANDS.items())
    return f"usage: tensorferry [--version] COMMAND ...\n\n{commands}\n\ntensorferry COMMAND --help, or tensorferry help COMMAND, describes a command."


def _unknown(command: str) -> str:
    near = get_close_matches(command, _COMMANDS, 1)
    return f"unknown command {command!r}{f'; did you mean {near[0]}?' if near else ''}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 2 if it does not exist."""
    open_missing()
    code = 0
    try:
        code = _run(argv)
        # None if the process was started without one.
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has exited, as `head` does.
        discard_output()
    return code


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"], ["version"]):
        print(f"tensorferry {version('tensorferry')}")
        return 0
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(_usage())
        return 0
    if not arguments or arguments[0] not in _COMMANDS:
        print((_unknown(arguments[0]) if arguments else "") + _usage(), file=sys.stderr)
        return 2
    module, function, _ = _COMMANDS[arguments[0]]
    if arguments[0] == "serve":
        grpc_environment.prepare()
        malloc.reuse_large_buffers()
    command = imported(arguments[0], module, function)
    return 1 if command is None else int(command(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
