"""Shell commands about a running server: `ready`, `models` and `describe`.

Each returns its exit status: 0, or 1 after one line on stderr if the server cannot be reached or
refuses. A bad argument exits with 2, as argparse does.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from tensorferry.client.cli import examples
from tensorferry.client.cli.server_flags import add_model, call_server, server_parser
from tensorferry.client.errors import InvalidInput, Unavailable, Unimplemented
from tensorferry.client.messages.printable import aligned, printable
from tensorferry.client.threads.client import InferenceClient

# In place of a command with such a name, which could not be copied from a terminal.
_NOT_PRINTABLE = "no example: a name has characters that cannot be printed"


def ready(argv: Sequence[str]) -> int:
    """Return 0 if the server takes requests, 1 if it does not or cannot be reached."""
    parser = server_parser("ready", "Check that a server is running and ready: exit code 0 if so, else 1.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        if client.is_ready(timeout=arguments.timeout):
            return
        if client.is_live(timeout=arguments.timeout):
            raise Unavailable(
                grpc.StatusCode.UNAVAILABLE,
                "the server runs, but is not ready: tensorferry models shows its models",
            )
        raise Unavailable(
            grpc.StatusCode.UNAVAILABLE, "no server answers; is `tensorferry serve` running there?"
        )

    return call_server(parser, arguments, run)


def models(argv: Sequence[str]) -> int:
    """List the models of the server."""
    parser = server_parser("models", "List the models of a running server.")
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        try:
            found = client.models(timeout=arguments.timeout)
        except Unimplemented as error:
            text = "the server does not list its models (RepositoryIndex): name one, as in tensorferry describe MODEL"
            raise Unimplemented(error.code, text) from None
        rows = [("NAME", "VERSION", "STATE", "REASON")]
        rows += [(m.name, m.version or "-", m.state or "-", m.reason) for m in found]
        _print_table(rows)

    return call_server(parser, arguments, run)


def describe(argv: Sequence[str]) -> int:
    """Show the inputs and outputs of a model, and commands that call it."""
    parser = server_parser(
        "describe", "Show the inputs and outputs of a model of a running server, and commands that call it."
    )
    add_model(parser)
    arguments = parser.parse(argv)

    def run(client: InferenceClient) -> None:
        model = client.metadata(arguments.model, arguments.model_version, timeout=arguments.timeout)
        versions = f"versions {', '.join(model.versions)}" if model.versions else "no named versions"
        print(printable(f"{model.name}: {model.platform or 'unknown platform'}, {versions}"))
        rows = [("", "NAME", "DATATYPE", "SHAPE")]
        rows += [
            ("optional input" if t.optional else "input", t.name, t.datatype, str(list(t.shape)))
            for t in model.inputs
        ]
        rows += [("output", t.name, t.datatype, str(list(t.shape))) for t in model.outputs]
        if len(rows) > 1:
            _print_table(rows)
        if "batching" in model.properties:
            print(printable(f"batching: {model.properties['batching']}"))
        title = "Call it, with values of your own:"
        try:
            commands = [examples.infer_command(model, arguments)]
            if model.inputs:
                commands.append(examples.grpcurl_command(model, arguments))
            else:
                title = "The server names no inputs. If the model has some, send them as arrays:"
        except InvalidInput as error:
            commands = [f"no example: {error}"]
        print(f"\n{title}\n")
        print("\n\n".join(one if one.isprintable() else _NOT_PRINTABLE for one in commands))

    return call_server(parser, arguments, run)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    print(*aligned([tuple(map(printable, row)) for row in rows], left=range(len(rows[0]))), sep="\n")
