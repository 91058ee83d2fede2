"""Limits of the time that a host may take: for an answer, for each part of a file, and for everything."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tensorferry.server.remote.failures import TooSlowError
from tensorferry.server.remote.progress import size_text
from tensorferry.server.remote.stores import RemoteFile, Store
from tensorferry.server.remote.url import RemoteUrl
from tensorferry.server.threads import ThreadKind, new_thread

_T = TypeVar("_T")

# Longest wait for an answer, and for the next WINDOW_BYTES of a file.
WINDOW_SECONDS = 120.0
WINDOW_BYTES = 1 << 20
# Longest time for a model with the files beside it, or for a version of a model in a repository.
WHOLE_SECONDS = 6 * 3600.0
# Chunks that are read before they are asked for.
_AHEAD = 2
_ADVICE = "check the host and the network, or copy the model to this machine and serve the copy"


class TimedStore:
    """A store with limits of time, for one fetch. TooSlowError if the host exceeds one. `now` returns monotonic seconds."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], float] = time.monotonic,
        window_seconds: float = WINDOW_SECONDS,
        whole_seconds: float = WHOLE_SECONDS,
    ) -> None:
        self._store = store
        self._now = now
        self._window_seconds = window_seconds
        self._whole_seconds = whole_seconds
        self._end = now() + whole_seconds
        # What has arrived in the current window, and the seconds that the host took for it. A window goes on in the next
        # request, so that a host cannot begin another by closing the connection.
        self._arrived = 0
        self._taken = 0.0

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file."""
        return self._answer(url, lambda: self._store.describe(url))

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all files of a directory and below."""
        return self._answer(url, lambda: self._store.list(url))

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return the bytes from `offset` on, and where they begin."""
        start, chunks = self._answer(file.url, lambda: self._store.read(file, offset))
        return start, self._timed(file.url, chunks)

    def _answer(self, url: RemoteUrl, call: Callable[[], _T]) -> _T:
        def answers() -> Iterator[_T]:
            yield call()

        try:
            answer, _ = next(self._from_thread(answers()))
        except TimeoutError:
            raise TooSlowError(
                f"{url}: the host has not answered within {self._window_seconds:g} s; {_ADVICE}"
            ) from None
        self._check_whole(url)
        return answer

    def _timed(self, url: RemoteUrl, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            for chunk, seconds in self._from_thread(chunks):
                self._check_whole(url)
                self._arrived += len(chunk)
                self._taken += seconds
                if self._taken >= self._window_seconds:
                    if self._arrived < WINDOW_BYTES:
                        raise self._too_slow(url)
                    self._arrived, self._taken = 0, 0.0
                yield chunk
        except TimeoutError:
            raise self._too_slow(url) from None

    def _too_slow(self, url: RemoteUrl) -> TooSlowError:
        return TooSlowError(
            f"{url} arrives too slowly: {size_text(self._arrived)} in {self._window_seconds:g} s, at least "
            f"{size_text(WINDOW_BYTES)} must arrive; {_ADVICE}"
        )

    def _check_whole(self, url: RemoteUrl) -> None:
        if self._now() > self._end:
            raise TooSlowError(
                f"{url} has not arrived within {self._whole_seconds:g} s, the longest time for a model with its files; "
                f"{_ADVICE}"
            )

    def _from_thread(self, items: Iterator[_T]) -> Iterator[tuple[_T, float]]:
        """Yield what a thread takes from `items`, and the seconds that each took. TimeoutError if one takes too long.

        A thread, because no library limits the time of a whole answer: each byte that arrives restarts its timeouts. If
        it takes too long it is abandoned: it ends with its next item, and never delays the end of the process.
        """
        taken: queue.Queue[tuple[_T, float] | BaseException | None] = queue.Queue(_AHEAD)
        abandoned = threading.Event()

        def take() -> None:
            try:
                before = self._now()
                for item in items:
                    taken.put((item, self._now() - before))
                    if abandoned.is_set():
                        return
                    before = self._now()
                taken.put(None)
            except BaseException as error:
                taken.put(error)

        new_thread("download", take, ThreadKind.EXPENDABLE).start()
        try:
            while True:
                try:
                    item = taken.get(timeout=self._window_seconds)
                except queue.Empty:
                    raise TimeoutError from None
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            # The thread looks at this after it has put an item, for which there is room then.
            abandoned.set()
            while not taken.empty():
                taken.get_nowait()
