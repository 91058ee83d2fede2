"""States that a model function in steps keeps in its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from support.batcher.stateful import START, Make, ask, error_of, living, running_total, send, value

from tensorferry.batcher import HeldTensor, KeepsStates, StagedModel, StateTensor
from tensorferry.batcher.testing import ScriptedRunner


class _State(HeldTensor):
    def __init__(self, row: Any) -> None:
        super().__init__(row.dtype, row.shape)
        self.row = row
        self.copies = 0

    def numpy(self) -> Any:
        self.copies += 1
        return self.row.copy()


class _Keeping:
    """A running total that keeps its states, but not those of the batches whose numbers, from 0, are in `declined`.

    It takes the states of the batches in `as_arrays` as arrays, beside the other inputs.
    """

    def __init__(
        self,
        declined: Iterable[int] = (),
        run: Callable[[Any], Any] = running_total,
        as_arrays: Iterable[int] = (),
    ) -> None:
        self.declined = frozenset(declined)
        self.as_arrays = frozenset(as_arrays)
        self.run = run
        self.batches = -1
        self.states: Any = None
        self.made: list[_State] = []

    def keep_states(self, states: Any) -> None:
        self.states = dict(states)

    def place(self, tensors: Any) -> Any:
        self.batches += 1
        if self.batches in self.declined:
            return None
        held = () if self.batches in self.as_arrays else ("past",)
        return {
            name: [] if name in held else np.empty(shape, dtype) for name, (dtype, shape) in tensors.items()
        }

    def load(self, batch: Any) -> Any:
        past = batch["past"]
        if isinstance(past, list):
            rows = [
                each.data.row
                if isinstance(each.data, _State)
                else np.frombuffer(each.data, each.dtype).reshape(each.shape)
                for each in past
            ]
            past = np.concatenate(rows)
        return {**batch, "past": past}

    def __call__(self, batch: Any) -> Any:
        return self.run(batch)

    def fetch(self, outputs: Any) -> Any:
        if self.batches in self.declined:
            return outputs
        kept = [_State(row) for row in outputs["total"][:, None]]
        self.made += kept
        return {**outputs, "total": kept}


def test_a_state_stays_where_it_was_made(make: Make) -> None:
    model = _Keeping()
    assert isinstance(model, StagedModel)
    assert isinstance(model, KeepsStates)
    batcher = make(model)
    assert model.states == {"past": "total"}
    assert [ask(batcher, 1, **START), ask(batcher, 2), ask(batcher, 3)] == [10, 30, 60]
    assert [state.copies for state in model.made] == [0, 0, 0]
    assert living(batcher) == (1, 8)


def test_a_batch_that_it_declines_gets_arrays(make: Make) -> None:
    model = _Keeping(declined=[1, 2])
    batcher = make(model)
    assert [ask(batcher, x, **tag) for x, tag in ((1, START), (2, {}), (3, {}), (4, {}))] == [10, 30, 60, 100]
    assert [state.copies for state in model.made] == [1, 0]


def test_a_batch_whose_states_it_takes_as_arrays(make: Make) -> None:
    """Such as a device, on which smaller states are not worth a block of their own."""
    batcher = make(_Keeping(as_arrays=[1]))
    assert [ask(batcher, x, **tag) for x, tag in ((1, START), (2, {}), (3, {}))] == [10, 30, 60]


def test_requests_with_arrays_and_states_share_a_declined_batch(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    runner.release()
    batcher = make(_Keeping(declined=[2], run=runner), max_batch_size=2)
    assert ask(batcher, 1, 1, **START) == 10
    _, alone = send(batcher, 7, 3, **START)
    runner.await_batches(2)
    _, first = send(batcher, 2, 1)
    _, second = send(batcher, 5, 2, **START)
    runner.open()
    assert [value(recorder) for recorder in (alone, first, second)] == [70, 30, 50]
    assert len(runner.batches) == 3


def test_a_wanted_state_is_an_array_or_the_error_of_its_memory(make: Make) -> None:
    batcher = make(_Keeping())
    wanted = frozenset({"total"})
    _, shown = send(batcher, 1, wanted=wanted, **START)
    assert shown.await_outcome().outputs["total"].tolist() == [[1.0]]

    class Lost(_State):
        def numpy(self) -> Any:
            raise RuntimeError("the device has failed")

    class Losing(_Keeping):
        def fetch(self, outputs: Any) -> Any:
            return {**outputs, "total": [Lost(row) for row in outputs["total"][:, None]]}

    batcher = make(Losing())
    for number in (1, None):
        _, lost = send(batcher, 1, number, wanted=wanted, **START)
        assert str(error_of(lost)) == "the device has failed"
    assert ask(batcher, 1, 2, **START) == 10
    assert living(batcher) == (1, 8)


def test_a_state_of_another_form_ends_the_sequence(make: Make) -> None:
    batcher = make(_Keeping(), states=[StateTensor("past", "total", np.zeros((1, 1), np.float32))])
    _, answered = send(batcher, 1, **START)
    assert "output 'total' is float64[1, 1], but the state 'past' is float32[1, 1]" in str(error_of(answered))
    assert living(batcher) == (0, 0)
