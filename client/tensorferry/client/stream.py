"""The stream of the synchronous client: one call, several requests in flight.

grpcio pulls the requests on a thread of its own (`_Feed`); the consumer's thread reads the
answers (`run`). The consumer reads only while an answer is due, so a request that fails
before it is sent reaches the consumer after at most one answer, never after the next input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError
from tensorferry.client.inflight import InFlight, Outcome, unanswered
from tensorferry.client.messages import tensors
from tensorferry.client.messages.tensors import StreamRequest
from tensorferry.protos import inference_pb2 as pb

Encode = Callable[[StreamRequest], pb.ModelInferRequest]
Open = Callable[[Iterator[pb.ModelInferRequest]], Any]


class _Feed:
    """The iterator of messages that grpcio sends; it pulls a request when there is room for it.

    `next()` is called by one thread of grpcio, all else by the consumer's thread.
    """

    def __init__(self, requests: Iterator[StreamRequest], encode: Encode, in_flight: InFlight) -> None:
        self._requests = requests
        self._encode = encode
        self._in_flight = in_flight
        self._over = False
        self._failure: BaseException | None = None
        # Guards _in_flight, _over and _failure; never held while a request is pulled, checked,
        # encoded, sent or awaited.
        self._lock = threading.Lock()
        self._room_or_over = threading.Condition(self._lock)
        self._due_or_over = threading.Condition(self._lock)

    def __iter__(self) -> Iterator[pb.ModelInferRequest]:
        return self

    def __next__(self) -> pb.ModelInferRequest:
        while True:
            with self._lock:
                while not (self._over or self._in_flight.has_room()):
                    self._room_or_over.wait()
                if self._over:
                    raise StopIteration
            try:
                request = next(self._requests)
                sent = self._encoded(request)
            except StopIteration:
                self.stop()
                raise
            except BaseException as error:
                # Raised by the caller's iterable: it belongs to the consumer, who gets it once
                # what was sent is answered. grpcio would only log it.
                self.stop(error)
                raise StopIteration from None
            with self._lock:
                if self._over:
                    raise StopIteration
                self._in_flight.add(request.request_id)
                if isinstance(sent, InferenceError):
                    self._in_flight.settle(request.request_id, sent)
                self._due_or_over.notify()
            if not isinstance(sent, InferenceError):
                return sent

    def _encoded(self, request: StreamRequest) -> pb.ModelInferRequest | InferenceError:
        with self._lock:
            self._in_flight.check_new(request.request_id)
        try:
            return self._encode(request)
        except InferenceError as error:
            return error

    def stop(self, failure: BaseException | None = None) -> None:
        """Nothing more is sent."""
        with self._lock:
            if not self._over:
                self._over = True
                self._failure = failure
                self._room_or_over.notify()
                self._due_or_over.notify()

    def take(self) -> Outcome | None:
        """The next outcome; None when the consumer should read an answer, or the call's end."""
        with self._lock:
            while True:
                outcome = self._in_flight.take()
                if outcome is not None:
                    self._room_or_over.notify()
                    return outcome
                if self._over or self._in_flight.awaited:
                    return None
                self._due_or_over.wait()

    def settle(self, answer: pb.ModelStreamInferResponse) -> None:
        """An answer arrived."""
        outcome = tensors.decode_stream(answer)
        with self._lock:
            self._in_flight.settle(answer.infer_response.id, outcome)

    def abandon(self, broken: InferenceError | None) -> tuple[list[Outcome], BaseException | None]:
        """The call ended: the outcomes that were not taken, and what is to be raised after them."""
        with self._lock:
            if broken is None and self._in_flight.awaited:
                broken = unanswered(self._in_flight.awaited)
            outcomes = self._in_flight.abandon(broken) if broken else []
            return outcomes, self._failure or broken


def run(
    open_call: Open,
    requests: Iterator[StreamRequest],
    encode: Encode,
    in_flight: InFlight,
) -> Generator[Outcome, None, None]:
    """The outcomes of the requests, until all are answered.

    Raises what `requests` raised, once all that was sent is answered; InferenceError when the
    call ends early, after every request in flight has got it as its outcome. Closing the
    iterator cancels the call and wakes grpcio's thread, which then ends.
    """
    feed = _Feed(requests, encode, in_flight)
    call = open_call(feed)
    broken: InferenceError | None = None
    try:
        # The call may end while the consumer waits for the next request to be sent.
        if not call.add_callback(feed.stop):
            feed.stop()
        while True:
            outcome = feed.take()
            if outcome is not None:
                yield outcome
                continue
            try:
                feed.settle(next(call))
            except StopIteration:
                break
            except grpc.RpcError as error:
                broken = errors.from_rpc(error)
                break
        outcomes, failure = feed.abandon(broken)
        yield from outcomes
        if failure is not None:
            raise failure
    finally:
        feed.stop()
        call.cancel()
