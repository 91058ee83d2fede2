"""The child's side: runs the function on each batch that the server sends.

`python -m tensorferry.server.processes.functions.in_child DESCRIPTORS INPUTS OUTPUTS FILE MODEL`
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorferry.batcher import BatcherError
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.processes.functions.arrays import ArrayMemory
from tensorferry.server.processes.functions.errors import SentError
from tensorferry.server.processes.functions.model_calls import CallsToServer
from tensorferry.server.processes.functions.values import dumps, encode, loads
from tensorferry.server.processes.in_child import Parent
from tensorferry.server.processes.messages import Message
from tensorferry.server.python.functions.answers import NO_MORE, Answers, answers_of
from tensorferry.server.python.functions.app_file import find_function, import_app
from tensorferry.server.python.functions.call import Call, bound_call
from tensorferry.server.python.functions.failure import describe, traceback_text
from tensorferry.server.system.threads import watch_threads
from tensorferry.serving import DeclarationError, calls_through

# Kinds of messages. The child sends READY or NOT_READY once, and RETURNED, RAISED or ERROR for each RUN. A function that
# answers in streams may send YIELDED in place of RETURNED. The server then sends NEXT or END, which is answered as RUN is.
READY, NOT_READY, RUN, NEXT, END = "ready", "not ready", "run", "next", "end"
RETURNED, YIELDED, RAISED, ERROR = "returned", "yielded", "raised", "error"
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
        call = bound_call(declared)
    except (StartError, DeclarationError) as error:
        reason = str(error) if isinstance(error, StartError) else f"{path}: {error}"
        server.send(NOT_READY, content=dumps(reason))
        return
    except BaseException as error:
        reason = f"{path}: model {model!r} cannot be loaded:\n{traceback_text(error)}"
        server.send(NOT_READY, content=dumps(reason))
        return
    server.send(READY)
    runs = _Runs(ArrayMemory(inputs), ArrayMemory(outputs), call, streams=declared.streams)
    while (message := server.receive()) is not None:
        calls = CallsToServer(server)
        kind, content = runs.answer(message, calls)
        if kind == YIELDED:
            # The generator may read their results when it goes on, and the server answers none until then.
            calls.wait()
        calls.end(kind, content)


class _Runs:
    """Runs the function. `streams` says that it yields."""

    def __init__(self, inputs: ArrayMemory, outputs: ArrayMemory, call: Call, *, streams: bool) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._call = call
        self._streams = streams
        # Of the run that has not ended.
        self._answers: Answers | None = None

    def answer(self, message: Message, calls: CallsToServer) -> tuple[str, bytes]:
        """Return the kind and content of the answer to a message."""
        self._outputs.begin(message.fields["number"])
        try:
            with calls_through(calls):
                return self._answer(message)
        except (ServerError, BatcherError, MemoryError) as error:
            # Of another model that the function called. A MemoryError lets the batch run in parts.
            return ERROR, dumps(SentError.of(error))
        except BaseException as error:
            return RAISED, dumps(describe(error))

    def _answer(self, message: Message) -> tuple[str, bytes]:
        if message.kind == END:
            self._close()
            return RETURNED, dumps(None)
        if message.kind == RUN:
            returned = self._call(loads(message.content, self._inputs))
            if not self._streams:
                return RETURNED, self._encoded(returned)
            self._answers = answers_of(returned)
        assert self._answers is not None
        try:
            answer = self._answers.read()
            if answer is not NO_MORE:
                return YIELDED, self._encoded(answer)
        except BaseException:
            self._close()
            raise
        self._close()
        return RETURNED, dumps(None)

    def _encoded(self, value: Any) -> bytes:
        return dumps(encode(value, self._outputs, "the result"))

    def _close(self) -> None:
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()


if __name__ == "__main__":
    run_process(sys.argv[1:])
