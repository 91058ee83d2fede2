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
from tensorferry.server.processes.functions.in_child import ERROR, MAX_CONTENT, RAISED, READY, RUN
from tensorferry.server.processes.functions.model_calls import CALL, OVER, ServedCalls
from tensorferry.server.processes.functions.values import dumps, encode, loads
from tensorferry.server.processes.messages import Message, MessageError

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
        self._number += 1
        self._inputs.begin(self._number)
        content = dumps(encode(inputs, self._inputs, "the inputs"))
        self.running = True
        answer = self._exchange(content)
        self.running = False
        returned = self._read(answer.content)
        if answer.kind == RAISED:
            raise FunctionRaised(returned)
        if answer.kind == ERROR:
            raise returned.exception()
        return returned

    def _exchange(self, content: bytes) -> Message:
        """Send a batch and return the answer. Serve calls of other models meanwhile."""
        self.send(RUN, {"number": self._number}, content)
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
