"""The cache of answers: equal requests are not run again."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, new_request

from tensorferry.batcher import (
    AnswerCache,
    Batcher,
    BatcherClosed,
    Cancelled,
    ClientPolicy,
    DeadlineExceeded,
    Pipeline,
    QueueFull,
    Request,
    Stage,
)
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

Array = np.ndarray[Any, Any]


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Double x. A negative x fails."""
    if (batch["x"] < 0).any():
        raise ValueError("negative")
    return {"y": batch["x"] * 2}


@pytest.fixture
def model() -> ScriptedRunner:
    return ScriptedRunner(doubled, gated=True)


@pytest.fixture
def cache(make: Make, model: ScriptedRunner) -> AnswerCache:
    return AnswerCache(make(model, max_batch_size=4), 10_000, by_rows=True)


def rows(*values: float) -> Array:
    return np.array([[value] for value in values], np.float64)


def send(cache: AnswerCache, inputs: Array, **options: Any) -> tuple[Request, Recorder]:
    recorder = Recorder()
    request = new_request({"x": inputs}, recorder, **options)
    cache.enqueue(request)
    return request, recorder


def outputs(recorder: Recorder) -> list[float]:
    outcome = recorder.await_outcome()
    assert outcome.error is None, outcome.error
    found: list[float] = outcome.outputs["y"][:, 0].tolist()
    return found


def error_of(recorder: Recorder) -> BaseException | None:
    return recorder.await_outcome().error


def counts(cache: AnswerCache) -> tuple[int, int, int]:
    found = cache.statistics()
    return found.hits, found.misses, found.rows


def test_an_equal_row_is_not_run_again(cache: AnswerCache, model: ScriptedRunner) -> None:
    model.open()
    assert [outputs(send(cache, rows(value))[1]) for value in (1, 2, 1, 1)] == [[2], [4], [2], [2]]
    assert len(model.batches) == 2
    assert counts(cache) == (2, 2, 2)


def test_rows_of_larger_requests_are_known_one_by_one(cache: AnswerCache, model: ScriptedRunner) -> None:
    model.open()
    assert outputs(send(cache, rows(1, 2, 3))[1]) == [2, 4, 6]
    assert outputs(send(cache, rows(3, 1))[1]) == [6, 2]
    assert len(model.batches) == 1
    assert outputs(send(cache, rows(3, 4))[1]) == [6, 8]
    assert len(model.batches) == 2
    assert outputs(send(cache, rows(*range(10)))[1]) == [2 * value for value in range(10)]
    assert outputs(send(cache, rows(9))[1]) == [18]
    assert counts(cache) == (2, 3, 10)


def test_without_rows_a_request_is_known_as_a_whole(make: Make, model: ScriptedRunner) -> None:
    model.open()
    cache = AnswerCache(make(model, max_batch_size=0), 10_000, by_rows=False)
    assert outputs(send(cache, rows(1, 2))[1]) == outputs(send(cache, rows(1, 2))[1]) == [2, 4]
    assert outputs(send(cache, rows(1))[1]) == [2]
    assert counts(cache) == (1, 2, 2)


def test_a_request_of_no_rows_runs(cache: AnswerCache, model: ScriptedRunner) -> None:
    model.open()
    assert [outputs(send(cache, rows()[:, None])[1]) for _ in range(2)] == [[], []]
    assert len(model.batches) == 2


def test_strings_in_a_list_keep_the_nuls_at_their_ends(make: Make) -> None:
    answers = AnswerCache(
        make(lambda batch: {"y": [b"ab\0"] * len(batch["x"])}, max_batch_size=4), 10_000, by_rows=True
    )
    found = [send(answers, rows(1))[1].await_outcome().outputs["y"][0] for _ in range(2)]
    assert found == [b"ab\0"] * 2
    assert counts(answers) == (1, 1, 1)


def batcher_or_pipeline(kind: str, batcher: Batcher) -> Batcher | Pipeline:
    if kind == "batcher":
        return batcher
    stage = Stage("only", batcher, inputs={"x": "x"}, outputs={"y": "y"})
    return Pipeline("p", [stage], inputs=["x"], outputs=["y"])


@pytest.mark.parametrize("kind", ["batcher", "pipeline"])
def test_queued_requests_get_the_answer_of_an_equal_one(make: Make, model: ScriptedRunner, kind: str) -> None:
    """Those that arrive while it runs are not run. Each can be cancelled, and has its deadline."""
    batcher = batcher_or_pipeline(kind, make(model, max_batch_size=4))
    cache = AnswerCache(batcher, 10_000, by_rows=True)
    first, ran = send(cache, rows(1))
    model.await_batches(1)
    equal = [send(cache, rows(1)) for _ in range(6)]
    _, other = send(cache, rows(3))
    assert batcher.cancel(equal[0][0])
    assert isinstance(error_of(equal[0][1]), Cancelled)
    model.open()
    assert outputs(ran) == [2]
    assert [outputs(recorder) for _, recorder in equal[1:]] == [[2]] * 5
    assert outputs(other) == [6]
    assert [batch["x"].tolist() for batch in model.batches] == [[[1]], [[3]]]
    assert counts(cache) == (5, 3, 2)
    assert batcher.drain(PATIENCE)
    assert not batcher.cancel(first)


@pytest.mark.parametrize("kind", ["batcher", "pipeline"])
def test_a_batch_has_only_one_of_equal_requests(make: Make, model: ScriptedRunner, kind: str) -> None:
    """The others get its answer, or run after it if it fails."""
    cache = AnswerCache(batcher_or_pipeline(kind, make(model, max_batch_size=4)), 10_000, by_rows=True)
    _, running = send(cache, rows(0))
    model.await_batches(1)
    sent = [
        send(cache, rows(*values))[1] for values in ((1,), (1,), (2, 3), (1,), (2, 3), (-1,), (-1,), (4,))
    ]
    model.open()
    assert outputs(running) == [0]
    found = [recorder.await_outcome() for recorder in sent]
    assert [None if outcome.error else outcome.outputs["y"][:, 0].tolist() for outcome in found] == [
        *([2], [2], [4, 6], [2], [4, 6], None, None, [8])
    ]
    assert [batch["x"][:, 0].tolist() for batch in model.batches] == [
        [0],
        [1, 2, 3],
        [-1, 4],
        [-1],
        [4],
        [-1],
    ]


def test_an_equal_request_that_waits_is_refused_and_expires_as_others(
    make: Make, model: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(model, clock=clock, max_queue_size=2)
    cache = AnswerCache(batcher, 10_000, by_rows=True)
    _, first = send(cache, rows(1), deadline=5.0)
    model.await_batches(1)
    _, early = send(cache, rows(1), deadline=1.0)
    _, late = send(cache, rows(1), deadline=100.0)
    with pytest.raises(QueueFull):
        send(cache, rows(1))
    clock.advance(2.0)
    assert isinstance(error_of(early), DeadlineExceeded)
    clock.advance(5.0)
    model.open()
    assert isinstance(error_of(first), DeadlineExceeded)
    assert outputs(late) == [2]
    assert batcher.statistics().queue_delays.sum == 7.0


def test_a_closed_batcher_answers_those_that_wait_for_an_equal_one(make: Make, model: ScriptedRunner) -> None:
    batcher = make(model)
    cache = AnswerCache(batcher, 10_000, by_rows=True)
    sent = [send(cache, rows(1))[1]]
    model.await_batches(1)
    sent += [send(cache, rows(1))[1] for _ in range(3)]
    assert not batcher.drain(0.0)
    model.open()
    assert [outputs(recorder) for recorder in sent] == [[2]] * 4


def test_a_failure_is_not_kept(cache: AnswerCache, model: ScriptedRunner) -> None:
    sent = [send(cache, rows(-1))[1] for _ in range(2)]
    model.open()
    assert [type(error_of(recorder)) for recorder in sent] == [ValueError, ValueError]
    assert isinstance(error_of(send(cache, rows(-1))[1]), ValueError)
    assert counts(cache) == (0, 3, 0)


def test_a_refused_request_leaves_nothing_behind(make: Make, model: ScriptedRunner) -> None:
    batcher = make(model, max_batch_size=1, max_queue_size=1)
    cache = AnswerCache(batcher, 10_000, by_rows=True)
    _, first = send(cache, rows(1))
    model.await_batches(1)
    _, second = send(cache, rows(2))
    with pytest.raises(QueueFull):
        send(cache, rows(3))
    model.open()
    assert [outputs(first), outputs(second)] == [[2], [4]]
    assert batcher.wait_idle(PATIENCE)
    assert outputs(send(cache, rows(3))[1]) == [6]
    assert batcher.drain()
    for value in (3, 4):
        with pytest.raises(BatcherClosed):
            send(cache, rows(value))


def test_the_rows_used_last_are_kept(make: Make, model: ScriptedRunner) -> None:
    model.open()
    cache = AnswerCache(make(model), 1100, by_rows=True)
    for value in (1, 2, 1, 3, 1, 2):
        outputs(send(cache, rows(value))[1])
    found = cache.statistics()
    assert (found.hits, found.misses, found.rows) == (2, 4, 2)
    assert found.nbytes <= 1100
    small = AnswerCache(make(model), 100, by_rows=True)
    assert outputs(send(small, rows(1))[1]) == [2]
    assert counts(small) == (0, 1, 0)


def test_one_client_does_not_learn_what_another_has_asked(cache: AnswerCache, model: ScriptedRunner) -> None:
    model.open()
    for client in ("a", "b", "a", ""):
        outputs(send(cache, rows(1), client=client)[1])
    assert counts(cache) == (1, 3, 3)


def test_inputs_that_differ_in_anything_are_different(make: Make) -> None:
    """Each of many inputs, one of which differs in one bit, in its shape, its type or how its text is divided."""

    def described(batch: dict[str, Any]) -> dict[str, Any]:
        (array,) = batch.values()
        text = repr((array.dtype.str, array.shape, [*batch], array.tolist()))
        return {"y": np.array([text], object)}

    cache = AnswerCache(make(described, max_batch_size=0), 1 << 20, by_rows=False)
    chance = random.Random(1)
    values: list[tuple[str, Array]] = []
    for _ in range(50):
        base = np.frombuffer(chance.randbytes(24), np.int32)
        values += [("x", base), ("x", base.reshape(2, 3)), ("x", base.view(np.uint32)), ("z", base)]
        bits = base.copy()
        bits[chance.randrange(6)] ^= 1 << chance.randrange(31)
        values.append(("x", bits))
    for texts in (["ab", "c"], ["a", "bc"], ["abc", ""], ["", "abc"], ["abc\0", ""], ["abc"], [b"abc"]):
        values.append(("x", np.array(texts, object)))
    for _ in range(2):
        for name, array in values:
            recorder = Recorder()
            cache.enqueue(new_request({name: array}, recorder))
            found = recorder.await_outcome().outputs["y"][0]
            assert found == repr((array.dtype.str, array.shape, [name], array.tolist()))
    assert counts(cache) == (len(values), len(values), len(values))


@pytest.mark.parametrize(
    "options",
    [{}, {"clients": ClientPolicy(fair=True)}, {"priority_weights": (2, 1)}, {"workers": 2}],
    ids=["alike", "fair", "classes", "two functions"],
)
def test_counts_and_answers_under_many_threads(make: Make, options: dict[str, Any]) -> None:
    batcher = make(doubled, max_batch_size=8, **options)
    cache = AnswerCache(batcher, 2000, by_rows=True)
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(50):
            values = [float(chance.randrange(6)) for _ in range(chance.choice((1, 1, 1, 3)))]
            request, recorder = send(
                cache,
                rows(*values),
                client=chance.choice("ab"),
                priority=chance.randint(0, batcher.priorities),
            )
            if chance.random() < 0.1:
                batcher.cancel(request)
            outcome = recorder.await_outcome()
            if outcome.error is not None and not isinstance(outcome.error, Cancelled):
                wrong.append(outcome.error)
            elif outcome.error is None and outcome.outputs["y"][:, 0].tolist() != [2 * v for v in values]:
                wrong.append(outcome.outputs)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    found = cache.statistics()
    assert found.nbytes <= 2000
    assert found.hits + found.misses <= 32 * 50
    assert found.hits > 0
    assert found.misses > 0
