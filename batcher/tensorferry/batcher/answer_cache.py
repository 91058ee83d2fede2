"""Cache of a model's answers, before its queue: equal rows are not run again, and those in flight run once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.errors import Cancelled, DeadlineExceeded, QueueFull, Shed
from tensorferry.batcher.pipeline.pipeline import Pipeline
from tensorferry.batcher.request import Outcome, Request

# Bytes that a row counts beside its outputs: those of its key and of the objects around it.
_ROW_BYTES = 512
# Errors of one request, which say nothing of an equal one.
_OWN_ERRORS = (Cancelled, DeadlineExceeded, QueueFull, Shed)

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Requests since the start that were answered by the cache, and others, and how long the cache looked for them and copied, in seconds.

    A request that waited for an equal one counts as answered by the cache. `rows` are kept now, of `nbytes` bytes.
    """

    hits: int
    misses: int
    hit_seconds: float
    miss_seconds: float
    rows: int
    nbytes: int


class AnswerCache:
    """Keeps the outputs of rows, those used last, of at most `max_bytes`. Thread-safe.

    Requests are enqueued and cancelled here in place of `batcher`. A row is known by the hash of its inputs, and of its client,
    because the time of an answer would tell one client what another has asked. A request of several rows runs as a whole
    unless all of them are known. A request of one row that is like one in flight waits for that one's answer. If the other
    request is cancelled, too late or dropped, it runs itself.

    `batched` is whether axis 0 counts rows. The function must give equal rows equal outputs, whatever else is in the batch.
    """

    def __init__(
        self,
        batcher: Batcher | Pipeline,
        max_bytes: int,
        *,
        batched: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = batcher
        self._max_bytes = max_bytes
        self._batched = batched
        self._clock = clock
        # Guards all below. While it is held, no row is hashed or copied, and no request is enqueued or completed.
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, tuple[_Row, int]] = OrderedDict()
        self._nbytes = 0
        # Requests that wait for an equal one in flight, by its key, and the keys of those that wait.
        self._waiting: dict[bytes, list[Request]] = {}
        self._waits_for: dict[Request, bytes] = {}
        self._hits = self._misses = 0
        self._hit_seconds = self._miss_seconds = 0.0

    def enqueue(self, request: Request, *, notify: bool = True) -> bool:
        """Answer a request, let it wait for an equal one, or enqueue it; see `Batcher.enqueue`."""
        began = self._clock()
        keys = _keys(request, batched=self._batched)
        alone = keys[0] if len(keys) == 1 else None
        with self._lock:
            known = self._known_locked(keys)
            if known is None and alone is not None:
                if alone in self._waiting:
                    self._waiting[alone].append(request)
                    self._waits_for[request] = alone
                    return False
                self._waiting[alone] = []
        if known is None:
            return self._run(request, keys, notify, self._clock() - began)
        looked_up = self._clock() - began
        self._batcher.answer_without_run(request, _joined(known))
        self._count_hit(looked_up)
        return False

    def _known_locked(self, keys: Sequence[bytes]) -> Sequence[_Row] | None:
        """Return the outputs of all rows, which become those used last; None if one is not known."""
        if not all(key in self._rows for key in keys):
            return None
        for key in keys:
            self._rows.move_to_end(key)
        return [self._rows[key][0] for key in keys]

    def _count_hit(self, seconds: float) -> None:
        with self._lock:
            self._hits += 1
            self._hit_seconds += seconds

    def _run(self, request: Request, keys: Sequence[bytes], notify: bool, looked_up: float) -> bool:
        complete = request.complete
        request.complete = partial(self._completed, keys, complete)
        try:
            runs_soon = self._batcher.enqueue(request, notify=notify)
        except BaseException:
            request.complete = complete
            self._again(self._no_longer_in_flight(keys))
            raise
        with self._lock:
            self._misses += 1
            self._miss_seconds += looked_up
        return runs_soon

    def _completed(
        self, keys: Sequence[bytes], complete: Callable[[Outcome], None], outcome: Outcome
    ) -> None:
        """Keep the rows of a request that has run, and complete it and those that wait for it."""
        began = self._clock()
        rows: Sequence[_Row] = ()
        if outcome.error is None:
            # Outputs that cannot be copied are the transport's problem, which encodes them.
            with suppress(Exception):
                rows = _copies(outcome.outputs, len(keys))
            self._keep(keys, rows)
        waiting = self._no_longer_in_flight(keys)
        with self._lock:
            self._miss_seconds += self._clock() - began
        complete(outcome)
        if outcome.error is None and rows:
            for request in waiting:
                self._answer(request, rows)
        elif outcome.error is not None and not isinstance(outcome.error, _OWN_ERRORS):
            for request in waiting:
                request.complete(Outcome(error=outcome.error))
        else:
            self._again(waiting)

    def _keep(self, keys: Sequence[bytes], rows: Sequence[_Row]) -> None:
        sizes = [_ROW_BYTES + sum(map(_size, row.values())) for row in rows]
        with self._lock:
            for key, row, size in zip(keys, rows, sizes, strict=False):
                if size <= self._max_bytes and key not in self._rows:
                    self._rows[key] = row, size
                    self._nbytes += size
            while self._nbytes > self._max_bytes:
                _, (_, size) = self._rows.popitem(last=False)
                self._nbytes -= size

    def _no_longer_in_flight(self, keys: Sequence[bytes]) -> Sequence[Request]:
        """Return the requests that wait for the one with these keys, which nothing waits for any more."""
        with self._lock:
            waiting = self._waiting.pop(keys[0], []) if len(keys) == 1 else []
            for request in waiting:
                del self._waits_for[request]
        return waiting

    def _answer(self, request: Request, rows: Sequence[_Row]) -> None:
        try:
            self._batcher.answer_without_run(request, _joined(rows))
        except Exception as error:
            # Too late, or the batcher was closed meanwhile.
            request.complete(Outcome(error=error))
        else:
            self._count_hit(0.0)

    def _again(self, waiting: Sequence[Request]) -> None:
        """Run the first of these requests, for which the others wait."""
        for request in waiting:
            try:
                self.enqueue(request)
            except Exception as error:
                request.complete(Outcome(error=error))

    def cancel(self, request: Request) -> bool:
        """Withdraw a request; see `Batcher.cancel`. Those that wait for it run without it."""
        with self._lock:
            key = self._waits_for.pop(request, None)
            if key is not None:
                self._waiting[key].remove(request)
        if key is None:
            return self._batcher.cancel(request)
        request.complete(Outcome(error=Cancelled("the caller cancelled before the request was answered")))
        return True

    def statistics(self) -> CacheStatistics:
        """Return counts since the start, and the current sizes."""
        with self._lock:
            return CacheStatistics(
                self._hits,
                self._misses,
                self._hit_seconds,
                self._miss_seconds,
                len(self._rows),
                self._nbytes,
            )


def _keys(request: Request, *, batched: bool) -> Sequence[bytes]:
    """Return the hash of each row, or of the whole request if axis 0 counts no rows."""
    rows = request.rows if batched else 1
    shapes = [
        (tensor.dtype.str, tensor.shape if at in request.shared or not batched else tensor.shape[1:])
        for at, tensor in enumerate(request.tensors)
    ]
    common = blake2b(repr((request.client, request.names, shapes)).encode(errors="surrogatepass"))
    keys = []
    for row in range(rows):
        digest = common.copy()
        for at, tensor in enumerate(request.tensors):
            whole = at in request.shared or rows == 1
            if tensor.dtype.hasobject:
                for element in tensor.data.flat if whole else tensor.data[row : row + 1].flat:
                    text = element.encode(errors="surrogatepass") if isinstance(element, str) else element
                    # With the length, so that elements cannot be divided in another way.
                    digest.update(len(text).to_bytes(8, "little"))
                    digest.update(text)
            else:
                data = memoryview(tensor.data).cast("B")
                size = len(data) // rows
                digest.update(data if whole else data[row * size : (row + 1) * size])
        keys.append(digest.digest())
    return keys


def _copies(outputs: Mapping[str, Any], rows: int) -> Sequence[_Row]:
    """Return the outputs of each row; copies, because outputs are views of the whole batch's."""
    found = []
    for row in range(rows):
        part = outputs if rows == 1 else {name: output[row : row + 1] for name, output in outputs.items()}
        copied = {name: np.array(output) for name, output in part.items()}
        for array in copied.values():
            array.flags.writeable = False
        found.append(copied)
    return found


def _joined(rows: Sequence[_Row]) -> _Row:
    if len(rows) == 1:
        return rows[0]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _size(array: Any) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else int(array.nbytes)
