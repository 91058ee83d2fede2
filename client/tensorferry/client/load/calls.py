"""Calls of a load test: serialised requests out, completion callbacks in, as little work as possible between.

The callables are grpcio's own, without serialisers. Answers of unary calls are not parsed.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tensorferry.client.connection.channel import COMPLETION_ORDER, CallMetadata
from tensorferry.client.errors import STATUS_PARAMETER
from tensorferry.client.messages import several_answers
from tensorferry.protos import inference_pb2 as pb

UNARY_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

# Code and message of a failed call.
Failure = tuple[str, str]
# Called once for each call, on any thread: with None for an answer, otherwise with the failure.
Done = Callable[[Failure | None], None]

_FOREIGN = (
    "a message of the stream answers no request, so the server may have other streams: leave out --stream"
)
_LATE = ("DEADLINE_EXCEEDED", "no answer within the timeout (measured by the client, on a stream)")


class Calls(ABC):
    """Starts calls on one channel. Thread-safe. Only calls that gRPC does not end itself need more than `start`."""

    @abstractmethod
    def start(self, body: bytes, done: Done) -> None:
        """Send a request, and return before its answer."""

    def expire(self) -> None:  # noqa: B027
        """End calls whose time is over."""

    def close(self) -> None:  # noqa: B027
        """End calls in progress. No call may be started afterwards."""


class UnaryCalls(Calls):
    """Unary calls on a channel; the timeout becomes their gRPC deadline. Closing the channel ends them."""

    def __init__(self, channel: grpc.Channel, metadata: CallMetadata, timeout: float) -> None:
        self._method: Callable[..., Any] = channel.unary_unary(UNARY_METHOD).future
        self._metadata, self._timeout = metadata or None, timeout

    def start(self, body: bytes, done: Done) -> None:
        """Send a request, and return before its answer."""
        call = self._method(body, timeout=self._timeout, metadata=self._metadata)
        call.add_done_callback(functools.partial(_ended, done))


def _ended(done: Done, call: Any) -> None:
    code = call.code()
    done(None if code is grpc.StatusCode.OK else (code.name, call.details() or ""))


class StreamCalls(Calls):
    """Requests on one stream of a channel.

    A stream that broke fails its requests, and the next request opens another. A request that is
    not answered within the timeout fails with DEADLINE_EXCEEDED, because a deadline of gRPC would
    be that of the whole stream.
    """

    def __init__(self, channel: grpc.Channel, metadata: CallMetadata, timeout: float) -> None:
        self._method: Callable[..., Any] = channel.stream_stream(STREAM_METHOD)
        self._metadata = (*metadata, *COMPLETION_ORDER)
        self._timeout = timeout
        self._numbers = itertools.count(1)
        # Guards the three below. No call of grpcio and no callback while holding it.
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[float, Done]] = {}
        self._requests: queue.SimpleQueue[bytes | None] | None = None
        self._call: Any = None

    def start(self, body: bytes, done: Done) -> None:
        """Send a request, and return before its answer."""
        name = str(next(self._numbers))
        # Fields of concatenated messages are merged, so this sets the id of a serialised request.
        message = body + _ID_TAG + bytes((len(name),)) + name.encode()
        opened = None
        with self._lock:
            self._pending[name] = (time.monotonic(), done)
            if self._requests is None:
                opened = self._requests = queue.SimpleQueue()
            self._requests.put(message)
        if opened is not None:
            call = self._method(iter(opened.get, None), metadata=self._metadata)
            with self._lock:
                self._call = call
            work = (call, opened)
            threading.Thread(target=self._receive, args=work, name="answers-of-stream", daemon=True).start()

    def expire(self) -> None:
        """End requests whose timeout has passed."""
        before = time.monotonic() - self._timeout
        with self._lock:
            names = [name for name, (begun, _) in self._pending.items() if begun < before]
            late = [self._pending.pop(name)[1] for name in names]
        for done in late:
            done(_LATE)

    def close(self) -> None:
        """Cancel the stream."""
        with self._lock:
            call, requests = self._call, self._requests
        if requests is not None:
            requests.put(None)
        if call is not None:
            call.cancel()

    def _receive(self, call: Any, requests: queue.SimpleQueue[bytes | None]) -> None:
        try:
            failure = ("UNAVAILABLE", "the server ended the stream")
            for message in call:
                foreign = self._answered(message)
                if foreign is not None:
                    failure = foreign
                    call.cancel()
                    break
        except grpc.RpcError as error:
            failure = (call.code().name, call.details() or str(error))
        requests.put(None)
        with self._lock:
            self._requests = None
            lost, self._pending = self._pending, {}
        for _, done in lost.values():
            done(failure)

    def _answered(self, message: bytes) -> Failure | None:
        """End the request whose last answer a message is; return why the stream is unusable if it names none."""
        try:
            answer = pb.ModelStreamInferResponse.FromString(message)
        except DecodeError:
            return "UNKNOWN", _FOREIGN
        if not answer.infer_response.id:
            # Such as MLServer, whose streams have other messages: one request, many answers.
            return "UNKNOWN", ": ".join(filter(None, (_FOREIGN, answer.error_message)))
        if not (answer.error_message or several_answers.is_last(answer.infer_response)):
            return None
        with self._lock:
            begun, done = self._pending.pop(answer.infer_response.id, (0.0, None))
        if done is None:
            # It has expired.
            return None
        if time.monotonic() - begun > self._timeout:
            done(_LATE)
        elif answer.error_message:
            code_name = answer.infer_response.parameters[STATUS_PARAMETER].string_param
            done((code_name or "UNKNOWN", answer.error_message))
        else:
            done(None)
        return None


# Field 3 of ModelInferRequest, of wire type 2.
_ID_TAG = bytes(((pb.ModelInferRequest.DESCRIPTOR.fields_by_name["id"].number << 3) | 2,))
