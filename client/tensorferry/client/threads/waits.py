"""Waits of the client for threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import DeadlineExceeded, Unavailable

# Ends every wait before a retry.
Closing = threading.Event
# Hands requests to the thread that sends them.
Queue = queue.SimpleQueue


def one_is_ready(methods: Iterable[Any], request: object, options: Mapping[str, Any]) -> bool:
    """Ask all servers at once; return whether one is ready, as soon as one says so, and cancel the other calls.

    Errors other than Unavailable and DeadlineExceeded are raised at once.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    calls: list[Any] = []
    try:
        for method in methods:
            call = method.future(request, wait_for_ready=True, **options)
            calls.append(call)
            call.add_done_callback(ended.put)
        for _ in calls:
            call = ended.get()
            if call.code() is grpc.StatusCode.OK:
                if call.result().ready:
                    return True
                continue
            failure = errors.from_rpc(call)
            if not isinstance(failure, (Unavailable, DeadlineExceeded)):
                raise failure
    finally:
        for call in calls:
            call.cancel()
    return False
