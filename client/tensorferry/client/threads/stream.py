"""Stream of the synchronous client: one call, several requests in flight.

grpcio takes the requests from `_RequestFeed` on its own thread; the consumer's thread reads the
answers in `run`. It reads only while an answer is due. So the error of a request that cannot be
sent reaches the consumer after at most one answer, and never waits for the next input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError
from tensorferry.client.inflight import InFlight, Taken
from tensorferry.client.messages import codec
from tensorferry.client.messages.codec import Inputs, StreamDefaults, StreamRequest
from tensorferry.protos import inference_pb2 as pb

Requests = Iterable[Inputs | StreamRequest]
Encode = Callable[[StreamRequest], pb.ModelInferRequest]
Open = Callable[[Iterator[pb.ModelInferRequest]], Any]


class _RequestFeed:
    """Iterator of the messages that grpcio sends; takes a request whenever there is room for it.

    One thread of grpcio calls `next()`; the consumer's thread calls every other method.
    """

    def __init__(self, requests: Iterator[StreamRequest], encode: Encode, in_flight: InFlight) -> None:
        self._requests = requests
        self._encode = encode
        self._in_flight = in_flight
        self._over = False
        self._all_sent = False
        self._failure: BaseException | None = None
        # Guards _in_flight, _over, _all_sent and _failure; never held while a request is pulled, checked,
        # encoded, sent or awaited. Reentrant, because the garbage collector may close the dropped
        # iterator on the thread that holds it.
        self._lock = threading.RLock()
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
                with self._lock:
                    self._all_sent = True
                self.stop()
                raise
            except BaseException as error:
                # The caller's iterable raised it. It is raised in the consumer once all sent
                # requests are answered; grpcio would only log it.
                self.stop(error)
                raise StopIteration from None
            with self._lock:
                if self._over:
                    raise StopIteration
                if isinstance(sent, InferenceError):
                    self._in_flight.add(request.request_id)
                    self._in_flight.settle(request.request_id, sent)
                else:
                    self._in_flight.add(request.request_id, sent)
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
        """Send nothing more."""
        with self._lock:
            if not self._over:
                self._over = True
                self._failure = failure
                self._room_or_over.notify()
                self._due_or_over.notify()

    def take(self) -> Taken | None:
        """Return the next outcome, or None if the consumer must read an answer or the call's end."""
        with self._lock:
            while True:
                taken = self._in_flight.take()
                if taken is not None:
                    self._room_or_over.notify()
                    return taken
                if self._over or self._in_flight.awaited:
                    return None
                self._due_or_over.wait()

    def settle(self, answer: pb.ModelStreamInferResponse) -> None:
        """Record an answer."""
        with self._lock:
            self._in_flight.answer(answer)
            # The last one of a request may have no outputs, and make room without being taken.
            self._room_or_over.notify()

    def abandon(self, broken: InferenceError | None) -> tuple[list[Taken], BaseException | None]:
        """End the stream: return the outcomes not yet taken, and the exception to raise after them."""
        with self._lock:
            left, broken = self._in_flight.end(broken, all_sent=self._all_sent)
            return left, self._failure or broken


def complete(requests: Requests, defaults: StreamDefaults) -> Generator[StreamRequest, None, None]:
    """Yield the requests of an iterable, with defaults filled in."""
    return (defaults.complete(request) for request in codec.iterated(requests))


def run(
    open_call: Open,
    requests: Iterator[StreamRequest],
    encode: Encode,
    in_flight: InFlight,
) -> Generator[Taken, None, None]:
    """Yield the outcomes of the requests, each with its message, until all are answered.

    An exception of `requests` is raised once all sent requests are answered. If the call ends
    early, every request in flight gets its InferenceError as outcome, and then it is raised.
    Closing the iterator cancels the call and wakes grpcio's thread, which then ends.
    """
    feed = _RequestFeed(requests, encode, in_flight)
    call = open_call(feed)
    broken: InferenceError | None = None
    try:
        # The call may end while the consumer waits for the next request.
        if not call.add_callback(feed.stop):
            feed.stop()
        while True:
            taken = feed.take()
            if taken is not None:
                yield taken
                continue
            try:
                feed.settle(next(call))
            except StopIteration:
                break
            except grpc.RpcError as error:
                broken = errors.from_rpc(error)
                break
        left, failure = feed.abandon(broken)
        yield from left
        if failure is not None:
            raise failure
    finally:
        feed.stop()
        call.cancel()
