"""The server's side of one child process that runs a function."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import Child, ChildEnded
from tensorferry.server.processes.functions.arrays import Array, ArrayMemory, create_memory
from tensorferry.server.processes.functions.errors import FunctionRaised
from tensorferry.server.processes.functions.in_child import (
    END,
    ERROR,
    MAX_CONTENT,
    NEXT,
    RAISED,
    READY,
    RUN,
    YIELDED,
)
from tensorferry.server.processes.functions.model_calls import CALL, OVER, ServedCalls
from tensorferry.server.processes.functions.values import dumps, encode, loads
from tensorferry.server.processes.messages import Message, MessageError
from tensorferry.server.python.functions.answers import NO_MORE

_MODULE = "tensorferry.server.processes.functions.in_child"


class FunctionChild(Child):
    """A child process that runs a function. It ends with the processes that the user's code has started."""

    def __init__(self, app: Path, model: str) -> None:
        self._number = 0
        # Whether the process has a batch that it has not answered.
        self.running = False
        with ExitStack() as stack:
            inputs = create_memory("tensorferry-inputs")
            self._inputs = stack.enter_context(closing(ArrayMemory(inputs)))
            outputs = create_memory("tensorferry-outputs")
            self._outputs = stack.enter_context(closing(ArrayMemory(outputs)))
            super().__init__(
                _MODULE,
                (str(inputs), str(outputs), str(app), model),
                inherited=(inputs, outputs),
                own_group=True,
                max_content=MAX_CONTENT,
                files=stack.pop_all(),
            )

    @property
    def began_run(self) -> bool:
        """Whether the process has begun the last run that it was sent."""
        return self._outputs.begun == self._number

    def await_ready(self) -> None:
        """Wait until the function is loaded. StartError if it cannot be, ChildEnded if the process ended."""
        message = self._next(None)
        if message.kind != READY:
            raise StartError(self._read(message.content))

    def run(self, inputs: Mapping[str, Array]) -> Any:
        """Run the function on a batch and return what it returned.

        Raises FunctionRaised; ServerError, BatcherError or MemoryError if the function did; or ChildEnded.
        """
        return self._run(inputs)[1]

    def next_answer(self, inputs: Mapping[str, Array] | None) -> Any:
        """Run a function that yields, and return its first answer, or without inputs the next one of the last run.

        NO_MORE after the last one. Raises as `run` does.
        """
        kind, answer = self._result_of(NEXT) if inputs is None else self._run(inputs)
        return answer if kind == YIELDED else NO_MORE

    def end_answers(self) -> None:
        """Close the generator. Raises as `run` does."""
        self._result_of(END)

    def _run(self, inputs: Mapping[str, Array]) -> tuple[str, Any]:
        self._number += 1
        self._inputs.begin(self._number)
        return self._result_of(RUN, dumps(encode(inputs, self._inputs, "the inputs")))

    def _result_of(self, kind: str, content: bytes = b"") -> tuple[str, Any]:
        """Send a message, and return the kind of the answer and what the function gave. Raises as `run` does."""
        self.running = True
        answer = self._exchange(kind, content)
        self.running = False
        given = self._read(answer.content)
        if answer.kind == RAISED:
            raise FunctionRaised(given)
        if answer.kind == ERROR:
            raise given.exception()
        return answer.kind, given

    def _exchange(self, kind: str, content: bytes) -> Message:
        """Send a message and return the answer. Serve calls of other models meanwhile."""
        self.send(kind, {"number": self._number}, content)
        calls: ServedCalls | None = None
        try:
            while (answer := self._next(calls)).kind == CALL:
                calls = calls or ServedCalls()
                calls.begin(answer.fields["number"], answer.content)
        finally:
            if calls is not None:
                calls.end()
        if calls is not None:
            self.send(OVER, {})
        return answer

    def _next(self, calls: ServedCalls | None) -> Message:
        """Return the next message. Send answers to calls meanwhile."""
        try:
            while (message := self.next_message(wake_fd=None if calls is None else calls.wake_fd)) is None:
                assert calls is not None
                for answer in calls.answers():
                    self.send(*answer)
        except MessageError as error:
            raise ChildEnded(f"it sent what is no message: {error}") from None
        return message

    def _read(self, content: bytes) -> Any:
        try:
            return loads(content, self._outputs)
        except (MemoryError, OSError):
            # Not its fault.
            raise
        except Exception as error:
            raise ChildEnded(f"it sent what cannot be read: {error}") from None
