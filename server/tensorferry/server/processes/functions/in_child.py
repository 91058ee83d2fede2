"""The child's side: runs the function on each batch that the server sends.

`python -m tensorferry.server.processes.functions.in_child DESCRIPTORS INPUTS OUTPUTS FILE MODEL`
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tensorferry.batcher import BatcherError
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.processes.functions.arrays import ArrayMemory
from tensorferry.server.processes.functions.errors import SentError
from tensorferry.server.processes.functions.model_calls import CallsToServer
from tensorferry.server.processes.functions.values import dumps, encode, loads
from tensorferry.server.processes.in_child import Parent
from tensorferry.server.python.functions.app_file import find_function, import_app
from tensorferry.server.python.functions.call import Call, bound_call
from tensorferry.server.python.functions.failure import describe, traceback_text
from tensorferry.server.system.threads import watch_threads
from tensorferry.serving import DeclarationError, FunctionModel, calls_through

# Kinds of messages. The child sends READY or NOT_READY once, and RETURNED, RAISED or ERROR for each RUN.
READY, NOT_READY, RUN = "ready", "not ready", "run"
RETURNED, RAISED, ERROR = "returned", "raised", "error"
# The most bytes of a value in a message, where no array of a batch is.
MAX_CONTENT = 16 << 30


def run_process(arguments: Sequence[str]) -> None:
    """Load the function and run it until the server closes the channel."""
    server = Parent(arguments[0], MAX_CONTENT)
    inputs, outputs = int(arguments[1]), int(arguments[2])
    path, model = Path(arguments[3]), arguments[4]
    faulthandler.enable()
    watch_threads(lambda: None)
    for file in (inputs, outputs):
        os.set_inheritable(file, False)
    try:
        declared = find_function(import_app(path), model, path)
        call = _bound(declared, path)
    except StartError as error:
        server.send(NOT_READY, content=dumps(str(error)))
        return
    server.send(READY)
    _serve(server, ArrayMemory(inputs), ArrayMemory(outputs), call)


def _bound(declared: FunctionModel, path: Path) -> Call:
    try:
        return bound_call(declared)
    except DeclarationError as error:
        raise StartError(f"{path}: {error}") from None
    except BaseException as error:
        raise StartError(
            f"{path}: model {declared.name!r} cannot be loaded:\n{traceback_text(error)}"
        ) from None


def _serve(server: Parent, inputs: ArrayMemory, outputs: ArrayMemory, call: Call) -> None:
    while (message := server.receive()) is not None:
        outputs.begin(message.fields["number"])
        calls = CallsToServer(server)
        calls.end(*_answer(message.content, inputs, outputs, call, calls))


def _answer(
    content: bytes, inputs: ArrayMemory, outputs: ArrayMemory, call: Call, calls: CallsToServer
) -> tuple[str, bytes]:
    """Return the kind and content of the answer to a batch."""
    try:
        batch = loads(content, inputs)
        with calls_through(calls):
            returned = call(batch)
        return RETURNED, dumps(encode(returned, outputs, "the result"))
    except (ServerError, BatcherError, MemoryError) as error:
        # Of another model that the function called. A MemoryError lets the batch run in parts.
        return ERROR, dumps(SentError.of(error))
    except BaseException as error:
        return RAISED, dumps(describe(error))


if __name__ == "__main__":
    run_process(sys.argv[1:])
