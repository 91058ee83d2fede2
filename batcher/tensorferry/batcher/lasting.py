"""Threads that last: what escapes from their work is put right, and the work begun again."""

from __future__ import annotations

from collections.abc import Callable


def last(work: Callable[[], None], mend: Callable[[BaseException], None]) -> None:
    """Calls `work` until it returns.

    Whatever escapes from it, be it SystemExit, goes to `mend`, which says what happened, puts right what was left
    half done, and waits a moment; then `work` is called again. So does what escapes from `mend`.
    """
    fault: BaseException | None = None
    while True:
        try:
            if fault is not None:
                mending, fault = fault, None
                mend(mending)
                # Its traceback knows the frames that fell, and what they held.
                del mending
            work()
            return
        except BaseException as error:
            fault = error
