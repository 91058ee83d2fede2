"""What a model function may be beside a plain one: one that knows the requests of its batch, or one in steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

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


@runtime_checkable
class StagedModel(Protocol):
    """A model function in steps: `place`, `load`, call, `fetch`.

    Each batch goes through them in this order, on one thread, until one raises. Errors mean what they mean when a
    function raises them (see `errors`). While one batch is in `__call__`, other threads may be in the other steps.
    """

    def place(self, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> Mapping[str, Any] | None:
        """Return arrays for a batch whose tensors have these dtypes and shapes; None if the batcher allocates them."""

    def load(self, batch: Any) -> Any:
        """Prepare a batch before the device is free; the result is the argument of the call."""

    def __call__(self, batch: Any) -> Any:
        """Run the batch."""

    def fetch(self, outputs: Any) -> Any:
        """Turn the result of the call into what a model function returns."""


@runtime_checkable
class KeepsStates(Protocol):
    """A `StagedModel` that can keep the states of sequences in its own memory."""

    def keep_states(self, states: Mapping[str, str]) -> None:
        """Keep these outputs, by the inputs that they become. Called once, before the first batch.

        From then on, `fetch` may return such an output as a list with a HeldTensor for each row, and `place` may return an
        empty list for such an input. The batcher then appends each row's Tensor to it, whose data may be a HeldTensor. A
        function must also take HeldTensors of others. It may decline for a batch: it then gets and returns arrays.
        """
