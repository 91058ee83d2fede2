"""Sequences: each request gets the state of the one before it, in batches with those of others."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, Recorder, new_request
from support.batcher.stateful import (
    START,
    Make,
    ask,
    busy,
    error_of,
    grows,
    living,
    running_total,
    send,
    value,
)

from tensorferry.batcher import (
    BatcherClosed,
    ClientPolicy,
    Control,
    ControlTensor,
    EndReason,
    InvalidRequest,
    ModelOutputError,
    QueueFull,
    SequenceEnded,
    SequenceLimits,
    SequenceNotStarted,
    SequenceTag,
    StateTensor,
)
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_a_request_gets_the_state_of_the_one_before_it(make: Make) -> None:
    batcher = make()
    assert [ask(batcher, 1, **START), ask(batcher, 2), ask(batcher, 3)] == [10, 30, 60]
    assert living(batcher) == (1, 8)
    assert ask(batcher, 4, end=True) == 100
    assert living(batcher) == (0, 0)
    assert batcher.sequence_statistics().ended == {EndReason.ENDED: 1}


def test_callers_do_not_get_states_unless_they_want_them(make: Make) -> None:
    batcher = make()
    _, hidden = send(batcher, 1, **START)
    _, shown = send(batcher, 1, wanted=frozenset({"total"}))
    assert list(hidden.await_outcome().outputs) == ["y"]
    assert shown.await_outcome().outputs["total"].tolist() == [[2.0]]


@pytest.mark.parametrize("tag", [None, SequenceTag(None)])
def test_a_request_without_an_id_is_a_sequence_by_itself(make: Make, tag: SequenceTag | None) -> None:
    batcher, recorder = make(), Recorder()
    for _ in range(2):
        batcher.enqueue(new_request({"x": np.array([[2.0]])}, recorder, sequence=tag))
    assert value(recorder) == 20
    assert living(batcher) == (0, 0)


def test_the_initial_state_may_be_any(make: Make) -> None:
    batcher = make(states=[StateTensor("past", "total", np.full((1, 1), 7.0))])
    assert ask(batcher, 1, **START) == 80


def test_requests_of_a_sequence_run_in_order_and_share_batches_with_those_of_others(
    make: Make, clock: VirtualClock
) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    # On the real clock, batches that take long make the batcher try smaller ones.
    batcher = make(runner, clock=clock)
    _, busy = send(batcher, 0, "busy", **START)
    runner.await_batches(1)
    sent = [send(batcher, x, number, start=x == 1)[1] for x in (1, 2, 3) for number in ("a", "b", "c")]
    runner.open()
    assert [value(each) for each in sent] == [10, 10, 10, 30, 30, 30, 60, 60, 60]
    assert value(busy) == 0
    # Three batches of one request of each.
    assert [batch["x"].ravel().tolist() for batch in runner.batches[1:]] == [[x] * 3 for x in (1, 2, 3)]


def test_a_start_of_a_living_sequence_begins_it_anew(make: Make) -> None:
    batcher = make()
    ask(batcher, 5, **START)
    assert [ask(batcher, 1, **START), ask(batcher, 1)] == [10, 20]
    assert batcher.sequence_statistics().ended == {EndReason.RESTARTED: 1}
    assert living(batcher) == (1, 8)


def test_owners_and_streams_have_sequences_of_their_own(make: Make) -> None:
    batcher = make()
    stream = object()
    others: list[dict[str, Any]] = [
        {},
        {"owner": "ann"},
        {"stream": stream},
        {"owner": "ann", "stream": stream},
    ]
    for x, other in enumerate(others, start=1):
        assert ask(batcher, x, 1, start=True, **other) == 10 * x
    for x, other in enumerate(others, start=1):
        assert ask(batcher, 0, 1, **other) == 10 * x
    with pytest.raises(SequenceNotStarted):
        send(batcher, 1, 1, owner="bob")


def test_what_is_refused_says_why(make: Make, clock: VirtualClock) -> None:
    batcher = make(name="vad", clock=clock, limits=SequenceLimits(idle_seconds=5))
    with pytest.raises(SequenceNotStarted, match="sequence 1 to model 'vad' must specify the START flag"):
        send(batcher, 1)
    ask(batcher, 1, start=True, end=True)
    with pytest.raises(
        SequenceEnded, match="has ended with its last request; begin it again with sequence_start"
    ):
        send(batcher, 1)
    error_of(send(batcher, -1, 2, **START)[1])
    with pytest.raises(SequenceEnded, match=r"sequence 2 .* a request of it failed"):
        send(batcher, 1, 2)
    ask(batcher, 1, "three", **START)
    clock.advance(5)
    with pytest.raises(SequenceEnded, match=r"sequence three .* no request came for 5 s"):
        send(batcher, 1, "three")
    stream = object()
    ask(batcher, 1, 4, stream=stream, start=True)
    batcher.end_stream(stream)
    with pytest.raises(SequenceEnded, match="ended with its stream"):
        send(batcher, 1, 4, stream=stream)
    assert batcher.statistics().refused == 5
    assert living(batcher) == (0, 0)
    # Each can begin again.
    assert ask(batcher, 1, 2, **START) == 10


def test_sequences_and_their_bytes_are_bounded(make: Make) -> None:
    batcher = make(limits=SequenceLimits(sequences=2, state_bytes=100))
    for number in (1, 2):
        ask(batcher, 1, number, **START)
    with pytest.raises(QueueFull, match="2 sequences of model 'batcher' live, as many as may"):
        send(batcher, 1, 3, **START)
    ask(batcher, 1, 1, end=True)
    assert ask(batcher, 1, 3, **START) == 10
    small = make(limits=SequenceLimits(state_bytes=20))
    for number in (1, 2):
        ask(small, 1, number, **START)
    with pytest.raises(QueueFull, match="have 16 bytes, of at most 20"):
        send(small, 1, 3, **START)


def test_a_state_that_grows_above_the_bound_fails_its_request(make: Make) -> None:
    batcher = make(
        grows,
        states=[StateTensor("past", "total", np.zeros((1, 0)))],
        limits=SequenceLimits(state_bytes=20),
    )
    assert [ask(batcher, 1, 1, **START), ask(batcher, 1, 2, **START)] == [1, 1]
    error = error_of(send(batcher, 1)[1])
    assert isinstance(error, QueueFull)
    assert "have 16 bytes, of at most 20, and 8 more are needed" in str(error)
    with pytest.raises(SequenceEnded, match="a request of it failed"):
        send(batcher, 1)
    # The last request of a sequence needs no room.
    assert [ask(batcher, 1, 2), ask(batcher, 1, 2, end=True)] == [2, 3]
    assert living(batcher) == (0, 0)


@pytest.mark.parametrize("policy", [ClientPolicy(max_requests=2), ClientPolicy(rate=2)])
def test_requests_of_a_client_that_wait_count(make: Make, clock: VirtualClock, policy: ClientPolicy) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner, clock=clock, clients=policy)
    with pytest.raises(SequenceNotStarted):
        send(batcher, 1, client="greedy")
    _, first = send(batcher, 1, client="greedy", **START)
    runner.await_batches(1)
    waiting, _ = send(batcher, 1, client="greedy")
    with pytest.raises(QueueFull, match="client 'greedy'"):
        send(batcher, 1, client="greedy")
    modest = send(batcher, 1, 2, client="modest", **START)[1]
    assert batcher.cancel(waiting)
    clock.advance(0.5)
    # There is room for one more, which takes it once only.
    last = send(batcher, 1, client="greedy")[1]
    runner.open()
    assert [value(each) for each in (first, modest, last)] == [10, 10, 20]
    clock.advance(0.5)
    assert ask(batcher, 1, client="greedy", end=True) == 30


@pytest.mark.parametrize(
    ("options", "most", "words"),
    [
        ({"max_queue_size": 2}, 2, r"2 requests of sequences .* with 16 bytes"),
        ({"max_queue_bytes": 40}, 5, "with 40 bytes"),
    ],
    ids=["size", "bytes"],
)
def test_waiting_requests_are_bounded_as_the_queue_is(
    make: Make, options: dict[str, int], most: int, words: str
) -> None:
    batcher, runner, first = busy(make, **options)
    sent = [first]
    for _ in range(most):
        last, recorder = send(batcher, 1)
        sent.append(recorder)
    with pytest.raises(QueueFull, match=words):
        send(batcher, 1)
    # One that is withdrawn makes room for another.
    sent.pop()
    assert batcher.cancel(last)
    sent.append(send(batcher, 1)[1])
    runner.open()
    assert [value(each) for each in sent] == [10 * at for at in range(1, most + 2)]


def test_a_start_that_the_queue_refuses_changes_nothing(make: Make) -> None:
    batcher, runner, first = busy(make, max_queue_size=1)
    second = send(batcher, 1, 2, **START)[1]
    with pytest.raises(QueueFull):
        send(batcher, 1, 3, **START)
    assert living(batcher)[0] == 2
    runner.open()
    assert [value(first), value(second)] == [10, 10]
    with pytest.raises(SequenceNotStarted):
        send(batcher, 1, 3)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_request_has_one_row(make: Make, rows: int) -> None:
    request = new_request({"x": np.ones((rows, 1))}, sequence=SequenceTag(1, start=True))
    batcher = make()
    for accept in (batcher.enqueue, partial(batcher.answer_without_run, outputs={})):
        with pytest.raises(InvalidRequest, match=rf"must specify batch-size 1 .* has {rows} rows"):
            accept(request)


def test_a_refused_bare_array_is_counted_and_not_changed(make: Make) -> None:
    batcher, request = make(), new_request(np.ones((1, 1)))
    with pytest.raises(InvalidRequest, match="one bare array"):
        batcher.enqueue(request)
    assert (len(request.tensors), batcher.statistics().refused) == (1, 1)


def test_controls_say_where_a_request_stands_in_its_sequence(make: Make) -> None:
    batches: list[dict[str, Any]] = []

    def recording(batch: dict[str, Any]) -> dict[str, Any]:
        batches.append(batch)
        return running_total(batch)

    def flag(name: str, control: Control) -> ControlTensor:
        return ControlTensor(name, control, np.zeros((1, 1), bool), np.ones((1, 1), bool))

    none, text = np.zeros((1, 1), np.int8), np.array([[""]], object)
    batcher = make(
        recording,
        controls=[
            *(flag(control.value, control) for control in (Control.START, Control.READY, Control.END)),
            ControlTensor("id", Control.ID, none, none),
            ControlTensor("text", Control.ID, text, text),
        ],
    )
    ask(batcher, 1, 5, start=True)
    ask(batcher, 1, 5)
    ask(batcher, 1, 5, end=True)
    ask(batcher, 1, None)
    seen = [[batch[name].item() for name in ("start", "ready", "end", "id", "text")] for batch in batches]
    assert seen == [
        [True, True, False, 5, "5"],
        [False, True, False, 5, "5"],
        [False, True, True, 5, "5"],
        [True, True, True, 0, ""],
    ]
    for number, why in (("five", "takes an integer"), (300, "takes int8")):
        with pytest.raises(InvalidRequest, match=f"sequence_id is {number!r}; model input 'id' {why}"):
            send(batcher, 1, number, **START)
    assert living(batcher) == (0, 0)


def test_a_request_that_needs_no_run_is_answered_at_once(make: Make) -> None:
    batcher, recorder = make(), Recorder()
    batcher.answer_without_run(new_request({"x": np.zeros((1, 0))}, recorder), {"y": 1})
    assert recorder.await_outcome().outputs == {"y": 1}
    with pytest.raises(InvalidRequest, match="the request has 0 rows"):
        batcher.answer_without_run(new_request({"x": np.zeros((0, 1))}, recorder), {})


def test_clients_have_equal_shares_of_a_batch(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner, clock=clock, max_batch_size=2, clients=ClientPolicy(fair=True))
    send(batcher, 0, "busy", **START)
    runner.await_batches(1)
    sent = [send(batcher, 1, number, client="a", **START)[1] for number in range(3)]
    sent.append(send(batcher, 2, 3, client="b", **START)[1])
    runner.open()
    assert [value(each) for each in sent] == [10, 10, 10, 20]
    assert sorted(runner.batches[1]["x"].ravel().tolist()) == [1, 2]


def test_a_model_may_write_again_to_the_array_that_it_returned(make: Make) -> None:
    total = np.zeros((1, 1))

    def reuses(batch: dict[str, Any]) -> dict[str, Any]:
        total[:] = batch["past"] + batch["x"]
        return {"y": total.copy(), "total": total}

    batcher = make(reuses)
    assert [ask(batcher, 1, 1, **START), ask(batcher, 5, 2, **START), ask(batcher, 1, 1)] == [1, 5, 2]


def test_a_state_that_does_not_fit_is_the_error_of_its_request(make: Make) -> None:
    batcher = make(lambda batch: {"y": batch["x"], "total": batch["past"].astype(np.float32)})
    error = error_of(send(batcher, 1, **START)[1])
    assert "output 'total' is float32[1, 1], but the state 'past' is float64[1, 1]" in str(error)
    assert living(batcher) == (0, 0)


@pytest.mark.parametrize("number", [None, 1])
def test_a_function_that_returns_no_dict_fails_its_requests(make: Make, number: int | None) -> None:
    batcher = make(lambda batch: batch["x"], states=[])
    assert isinstance(error_of(send(batcher, 1, number, **START)[1]), ModelOutputError)


def test_states_of_different_shapes_share_no_batch(make: Make) -> None:
    runner = ScriptedRunner(grows, gated=True)
    batcher = make(runner, states=[StateTensor("past", "total", np.zeros((1, 0)))])
    sent = [send(batcher, x, "a", start=x == 1)[1] for x in (1, 2)]
    runner.await_batches(1)
    sent.append(send(batcher, 5, "b", **START)[1])
    runner.open()
    assert [value(each) for each in sent] == [1, 3, 5]
    assert batcher.statistics().failed_batches == 0


def test_a_drain_answers_the_requests_that_wait(make: Make) -> None:
    runner = ScriptedRunner(running_total, gated=True)
    batcher = make(runner)
    sent = [send(batcher, 1, start=not at)[1] for at in range(3)]
    assert not batcher.idle
    assert not batcher.drain(0.0)
    for number in (1, None):
        with pytest.raises(BatcherClosed):
            send(batcher, 1, number)
    runner.open()
    assert batcher.drain(PATIENCE)
    assert [value(each) for each in sent] == [10, 20, 30]
    assert batcher.idle


def test_a_close_without_a_drain_fails_the_requests_that_wait(make: Make) -> None:
    batcher, runner, first = busy(make)
    after = send(batcher, 1)[1]
    assert not batcher.close(drain=False, timeout=0.0), "a worker runs the first"
    runner.open()
    assert value(first) == 10
    assert isinstance(error_of(after), BatcherClosed)
    assert batcher.statistics().refusals == {"closed": 1}


def test_many_sequences_keep_their_own_states(make: Make) -> None:
    batcher = make()

    def run(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(20):
            number, total = chosen.randrange(2**60), 0
            for step in range(chosen.randrange(1, 6)):
                x = chosen.randrange(1000)
                total += x
                assert ask(batcher, x, number, start=not step, owner=str(seed)) == 10 * total
            if chosen.random() < 0.5:
                error_of(send(batcher, -1, number, owner=str(seed))[1])
            else:
                ask(batcher, 0, number, owner=str(seed), end=True)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    found = batcher.sequence_statistics()
    assert (found.living, found.waiting, found.state_bytes, found.started) == (0, 0, 0, 160)
    assert sum(found.ended.values()) == 160


def test_a_sequence_that_is_begun_in_another_batcher_is_not_known_any_more(make: Make) -> None:
    batcher = make()
    for end in (False, True):
        tag = SequenceTag(1)
        assert not batcher.knows(tag)
        ask(batcher, 1, start=True, end=end)
        assert batcher.knows(tag)
        batcher.end_sequence(tag)
    assert not batcher.knows(tag)
    assert batcher.sequence_statistics().ended == {EndReason.RESTARTED: 1, EndReason.ENDED: 1}
