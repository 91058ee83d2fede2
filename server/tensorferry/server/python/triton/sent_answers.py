"""The responses of a decoupled model of Triton's Python backend, as answers of a function that yields."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any

from tensorferry.server.python.functions.answers import NO_MORE
from tensorferry.server.python.functions.failure import traceback_text
from tensorferry.server.python.triton.backend_utils import InferenceResponse, InferenceResponseSender, Tensor
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")


class SentAnswers:
    """The responses that `execute` sends until the last one, as arrays. See `Answers`."""

    def __init__(
        self,
        model: str,
        execute: Callable[[InferenceResponseSender], None],
        arrays: Callable[[InferenceResponse], Mapping[str, Any]],
    ) -> None:
        self._model, self._execute, self._arrays = model, execute, arrays
        # Guards the fields below; notified of each change. Nothing is called while it is held.
        self._changed = threading.Condition()
        # What `read` takes next: a response, an error of `execute`, or NO_MORE. None if nothing was sent.
        self._sent: Any = None
        self._over = False
        # On a thread of its own, because responses must be sent while `execute` runs.
        run = partial(copy_context().run, self._run)
        self._thread = new_thread("triton-execute", run, ThreadKind.EXPENDABLE)
        self._thread.start()

    def read(self) -> Any:
        """Return the arrays of the next response; NO_MORE after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent is not None or self._over)
            sent, self._sent = self._sent, None
            self._over = self._over or sent is NO_MORE
            self._changed.notify_all()
            if self._over:
                return NO_MORE
        if isinstance(sent, BaseException):
            raise sent
        return self._arrays(sent)

    def close(self) -> None:
        """Wait until `execute` returns."""
        self.cancel()
        # Models expect that `execute` is not called again before it returns.
        self._thread.join()

    def cancel(self) -> None:
        """Drop what `execute` sends from now on."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._execute(InferenceResponseSender(self._send, lambda: self._over))
        except BaseException as error:
            if not self._put(error):
                _log.warning(
                    "model %s: execute raised after the last response, or after its client left; no client gets the error:\n%s",
                    self._model,
                    traceback_text(error),
                )

    def _send(self, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            # With copies, because the model may change its arrays as soon as this returns.
            tensors = [Tensor(each.name(), each.as_numpy().copy()) for each in response.output_tensors()]
            self._put(InferenceResponse(tensors, response.error()))
        if final:
            self._put(NO_MORE)

    def _put(self, sent: Any) -> bool:
        """Let `read` take this. Return False if it is dropped, because it is sent after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent is None or self._over)
            if self._over:
                return False
            self._sent = sent
            self._changed.notify_all()
            return True
