"""Cache of a model's answers, before its queue: equal requests are not run again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from sys import getsizeof
from typing import Any

import numpy as np

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.execution.collate import whole_array
from tensorferry.batcher.pipeline.pipeline import Pipeline
from tensorferry.batcher.request import Outcome, Request

# Bytes that a row counts beside its outputs: those of its key and of the objects around it.
_ROW_BYTES = 512

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Requests since the start that were answered by the cache, and others, and how long the cache looked for them and copied, in seconds.

    A queued request that got the answer of an equal one counts as answered by the cache. `rows` are kept now, of `nbytes` bytes.
    """

    hits: int
    misses: int
    hit_seconds: float
    miss_seconds: float
    rows: int
    nbytes: int


class AnswerCache:
    """Keeps the outputs of requests, those used last, of at most `max_bytes`. Thread-safe.

    Requests are enqueued here in place of `batcher`. One is known by the hash of its inputs, and of its client, because the time
    of an answer would tell one client what another has asked. A batch has only one of several equal requests. When it has run,
    those that are still queued are answered, too. All are accepted, counted, expired and cancelled by the batcher.

    With `by_rows` each row is known by itself, and a request runs as a whole unless all of its rows are known. Axis 0 must count
    rows that do not affect each other, and every row must have outputs of the same shape. The function must give equal
    requests equal outputs.
    """

    def __init__(
        self,
        batcher: Batcher | Pipeline,
        max_bytes: int,
        *,
        by_rows: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = batcher
        self._max_bytes = max_bytes
        self._by_rows = by_rows
        self._clock = clock
        # Guards all below. While it is held, no row is hashed or copied, and no request is enqueued or completed.
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, tuple[_Row, int]] = OrderedDict()
        self._nbytes = 0
        # Requests in the batcher, in the order of their arrival, by their content.
        self._in_flight: dict[bytes, dict[Request, None]] = {}
        self._hits = self._misses = 0
        self._hit_seconds = self._miss_seconds = 0.0

    def enqueue(self, request: Request, *, notify: bool = True) -> bool:
        """Answer a request, or enqueue it; see `Batcher.enqueue`."""
        if self._by_rows and not request.rows:
            # It has no row that could be known.
            return self._batcher.enqueue(request, notify=notify)
        began = self._clock()
        keys = _keys(request, by_rows=self._by_rows)
        with self._lock:
            known = self._known_locked(keys)
        looked_up = self._clock() - began
        if known is None:
            return self._run(request, keys, notify, looked_up)
        complete = request.complete

        def counted(outcome: Outcome) -> None:
            self._count(looked_up, hit=True)
            complete(outcome)

        request.complete = counted
        try:
            self._batcher.answer_without_run(request, _joined(known))
        except BaseException:
            request.complete = complete
            raise
        return False

    def _known_locked(self, keys: Sequence[bytes]) -> Sequence[_Row] | None:
        """Return the outputs of all rows, which become those used last; None if one is not known."""
        if not all(key in self._rows for key in keys):
            return None
        for key in keys:
            self._rows.move_to_end(key)
        return [self._rows[key][0] for key in keys]

    def _count(self, seconds: float, *, hit: bool) -> None:
        with self._lock:
            if hit:
                self._hits += 1
                self._hit_seconds += seconds
            else:
                self._misses += 1
                self._miss_seconds += seconds

    def _run(self, request: Request, keys: Sequence[bytes], notify: bool, looked_up: float) -> bool:
        complete = request.complete
        request.complete = partial(self._completed, request, keys, complete, looked_up)
        content = request.content = b"".join(keys)
        with self._lock:
            self._in_flight.setdefault(content, {})[request] = None
        try:
            return self._batcher.enqueue(request, notify=notify)
        except BaseException:
            request.complete = complete
            self._leave(request, content)
            raise

    def _completed(
        self,
        request: Request,
        keys: Sequence[bytes],
        complete: Callable[[Outcome], None],
        looked_up: float,
        outcome: Outcome,
    ) -> None:
        """Keep the rows of a request that has run, complete it, and answer equal ones that are queued."""
        content = request.content or b""
        rows: Sequence[_Row] = ()
        began = self._clock()
        try:
            if outcome.batch is not None and outcome.error is None:
                rows = _copies(outcome.outputs, len(keys))
                self._keep(keys, rows)
        except Exception:
            # Outputs that cannot be copied are the transport's problem, which encodes them.
            rows = ()
        self._leave(request, content)
        # One that was answered while it was queued has no batch.
        hit = outcome.batch is None and outcome.error is None
        self._count(looked_up + self._clock() - began, hit=hit)
        complete(outcome)
        with self._lock:
            equal = list(self._in_flight.get(content, ())) if rows else ()
        if equal:
            outputs = _joined(rows)
            for other in equal:
                self._batcher.answer_queued(other, outputs)

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

    def _leave(self, request: Request, content: bytes) -> None:
        """Forget a request that is no longer in the batcher."""
        with self._lock:
            equal = self._in_flight[content]
            del equal[request]
            if not equal:
                del self._in_flight[content]

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


def _keys(request: Request, *, by_rows: bool) -> Sequence[bytes]:
    """Return the hash of each row, or of the whole request."""
    rows = request.rows if by_rows else 1
    shapes = [
        (tensor.dtype.str, tensor.shape if at in request.shared or not by_rows else tensor.shape[1:])
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
                    # With the length, so that elements cannot be divided in another way, and whether it is a str.
                    digest.update((2 * len(text) + (text is not element)).to_bytes(8, "little"))
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
        copied = {
            name: np.array(output if isinstance(output, np.ndarray) else whole_array(output))
            for name, output in part.items()
        }
        for array in copied.values():
            array.flags.writeable = False
        found.append(copied)
    return found


def _joined(rows: Sequence[_Row]) -> _Row:
    if len(rows) == 1:
        return rows[0]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _size(array: Any) -> int:
    return int(array.nbytes) + (sum(map(getsizeof, array.flat)) if array.dtype.hasobject else 0)
