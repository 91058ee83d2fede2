"""Compressed requests of a transport with one thread for all calls, submitted on other threads.

Decompressing and checking a message takes up to 30 ms, which would delay every other call on that thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from tensorferry.batcher import Cancelled
from tensorferry.server.identity import ClientIdentity, Metadata
from tensorferry.server.inference.reply import (
    InferenceCall,
    InferenceReply,
    LaterCall,
    TakeAnswer,
    error_reply,
)

_log = logging.getLogger("tensorferry.server")


class Unpacker:
    """Calls `submit`, that of the service, on the threads of an executor. Thread-safe.

    After the executor is shut down, `submit` is called on the calling thread.
    """

    def __init__(self, submit: Callable[..., InferenceCall], threads: Executor) -> None:
        self._submit = submit
        self._threads = threads

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata,
        caller: ClientIdentity,
        stream: object = None,
        answers: TakeAnswer | None = None,
        submitted: Callable[[], None] = lambda: None,
    ) -> InferenceCall:
        """See `InferenceService.submit`. A request that is withdrawn before a thread takes it is not unpacked.

        `submitted` is called once the service has the request, or it is answered.
        """
        pending = LaterCall()

        def serve() -> None:
            try:
                if pending.withdrawn:
                    left = Cancelled("the caller left before its message was unpacked")
                    complete(error_reply("", left, ("", ""), metadata))
                    return
                try:
                    call = self._submit(
                        data, deadline, complete, metadata, caller=caller, stream=stream, answers=answers
                    )
                except Exception as error:
                    _log.exception(
                        "a compressed request could not be served; this is a bug in tensorferry.server"
                    )
                    complete(error_reply("", error, ("", ""), metadata))
                    return
                pending.submitted(call)
            finally:
                submitted()

        try:
            self._threads.submit(serve)
        except RuntimeError:
            serve()
        return pending
