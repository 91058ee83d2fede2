"""Model functions that know the requests of their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tensorferry.batcher.request import Request


@runtime_checkable
class BatchAware(Protocol):
    """A model function whose `run_batch` is called instead of the function itself, with the batch's requests.

    It can ask them for their `owner` and `deadline`, and with `Request.is_wanted` whether their answers are still of use.
    It must not change or keep them. If none is wanted any more, it may raise DeadlineExceeded: requests whose deadline
    has passed do not run again after an error.

    It may also have a method `step_ends`, which returns the name and the end, on the batcher's clock, of each step of the
    last run, in their order. It is called after each run that did not raise.
    """

    def run_batch(self, inputs: Any, requests: Sequence[Request], /) -> Any:
        """Run a batch of these requests, whose rows are in their order, and return what a model function returns."""


ModelFunction: TypeAlias = Callable[[Any], Any] | BatchAware
