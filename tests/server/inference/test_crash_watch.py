"""Requests that may end the process: what runs is noted in the page, suspects run alone, and causes are refused."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server.rig import Array, Replies, fp32, request, response_of, signature, spec

from tensorferry.batcher import Batcher, Cancelled, DeadlineExceeded, StatefulBatcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import LimitError, ModelFailedError, NotReadyError, SuspectError
from tensorferry.server.identity import ANONYMOUS, ROLES, ClientIdentity
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.inference.requests.request_templates import Match
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.suspects import waiting_suspects
from tensorferry.server.inference.suspects.crash_watch import (
    CrashWatch,
    WatchedRequest,
    digest_of,
    note_running,
    owner_of,
)
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.processes.running_page import Running, RunningPage, create_page, read_page
from tensorferry.server.processes.suspect_requests import Findings, TrialLock
from tensorferry.server.runtime.recovery.watchdog import Watchdog

ANN, BOB = ClientIdentity("ann", ROLES), ClientIdentity("bob", ROLES)

# The models, and the datatypes of their input. `t` has sequences.
MODELS = {"m": "FP32", "n": "FP32", "i": "INT32", "s": "BYTES", "t": "FP32"}

# Of the whole request, and of its sample.
Hashes = tuple[bytes, bytes]


class Watch(CrashWatch):
    """A watch that keeps the last request."""

    last: Match

    def admit(self, match: Match, client: str) -> WatchedRequest:
        self.last = match
        return super().admit(match, client)


class Process:
    """The service of one of several processes, with its page. Batches run once the test opens the runner."""

    def __init__(self, folder: Path) -> None:
        # The watchdog's clock agrees.
        self.now = time.monotonic()
        self.file = create_page()
        self.all_serve = True
        self.trial = TrialLock(folder, lambda: self.all_serve)
        self.watch = Watch(RunningPage(os.dup(self.file)), self.trial, lambda: self.now)
        self.watchdog = Watchdog(60.0)
        self.watch.waiting.watch_deadlines(self.watchdog)
        self.runner = ScriptedRunner(lambda inputs: {"y": inputs["x"]}, gated=True)
        self.batchers: list[Batcher] = []
        registry = ModelRegistry()
        for name, datatype in MODELS.items():
            options: Any = {"max_batch_size": 8, "batch_started": note_running}
            batcher = (
                StatefulBatcher(self.runner, [], **options)
                if name == "t"
                else Batcher(self.runner, **options)
            )
            self.batchers.append(batcher)
            form = signature(spec("x", datatype, "batch", "n"), outputs=(spec("y", datatype, "batch", "n"),))
            registry.mark_ready(Model(name, "1", form, 8, "", batcher, math.inf))
        self.service = InferenceService(registry, crash_watch=self.watch)

    def close(self) -> None:
        self.runner.open()
        for batcher in self.batchers:
            assert batcher.close()
        self.watchdog.close()
        os.close(self.file)

    def submit(
        self,
        x: Array,
        model: str = "m",
        caller: ClientIdentity = ANONYMOUS,
        deadline: float = math.inf,
        **fields: Any,
    ) -> tuple[Any, Replies]:
        replies = Replies()
        data = request({"x": x}, model=model, **fields).SerializeToString()
        return self.service.submit(data, deadline, replies, caller=caller), replies

    def digests(self, x: Array, model: str = "m", **fields: Any) -> Hashes:
        self.submit(x, model, **fields)
        return digest_of(self.watch.last, whole=True), digest_of(self.watch.last, whole=False)

    def rows(self) -> list[int]:
        return [len(batch["x"]) for batch in self.runner.batches]

    def running(self) -> list[Running]:
        return read_page(self.file)[1]

    def find(self, **findings: Any) -> None:
        """Let the supervisor send these findings, which end after 600 s."""
        self.watch.on_findings(asdict(Findings(self.now + 600.0, **findings)))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.close()


def refusal(replies: Replies) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        response_of(replies.first())
    return caught.value


def strings(*texts: str) -> Array:
    return np.array([texts], object)


class TestDigest:
    def test_other_values_shapes_models_and_datatypes_have_others(self, process: Process) -> None:
        several = [
            process.digests(fp32(2, 3)),
            process.digests(fp32(2, 3) + 1),
            process.digests(fp32(3, 2)),
            process.digests(fp32(2, 3), "n"),
            process.digests(fp32(2, 3), parameters={"mode": pb.InferParameter(string_param="x")}),
            process.digests(fp32(2, 3).view(np.int32), "i"),
            process.digests(strings("a", "bc"), "s"),
            process.digests(strings("ab", "c"), "s"),
        ]
        for hashes in zip(*several, strict=True):
            assert len(set(hashes)) == len(several)

    def test_a_sample_is_of_both_ends_of_large_inputs(self, process: Process) -> None:
        for model, large, change in (
            ("m", fp32(1, 1000), 7.5),
            ("s", strings(*(str(number) for number in range(100))), "x"),
        ):
            whole, sample = process.digests(large, model)
            for at, noticed in ((0, True), (50, False), (-1, True)):
                changed = large.copy()
                changed[0, at] = change
                whole_of_changed, sample_of_changed = process.digests(changed, model)
                assert whole_of_changed != whole
                assert (sample_of_changed != sample) is noticed


class TestPage:
    def test_requests_are_noted_from_their_start_to_their_answer(self, process: Process) -> None:
        first = process.submit(fp32(1, 2), caller=ANN)[1]
        process.runner.await_batches(1)
        sample = digest_of(process.watch.last, whole=False)
        assert process.running() == [Running(owner_of("ann", "m"), sample, tried=False)]
        second = process.submit(fp32(1, 2))[1]
        assert len(process.running()) == 1
        process.runner.release()
        first.first()
        process.runner.await_batches(2)
        # Clients that are not identified have no name.
        assert process.running() == [Running(bytes(8), sample, tried=False)]
        process.runner.open()
        second.first()
        assert not process.running()

    def test_a_request_that_is_cancelled_in_the_queue_is_never_noted(self, process: Process) -> None:
        process.submit(fp32(1, 2))
        process.runner.await_batches(1)
        call, replies = process.submit(fp32(1, 2))
        call.cancel()
        assert isinstance(refusal(replies), Cancelled)
        last = process.submit(fp32(1, 2))[1]
        process.runner.release()
        process.runner.await_batches(2)
        assert len(process.running()) == 1
        process.runner.open()
        last.first()
        assert not process.running()

    def test_a_request_that_is_cancelled_while_it_runs_is_noted_to_the_end_of_the_run(
        self, process: Process
    ) -> None:
        call, replies = process.submit(fp32(1, 2))
        process.runner.await_batches(1)
        call.cancel()
        assert isinstance(refusal(replies), Cancelled)
        assert len(process.running()) == 1
        last = process.submit(fp32(1, 2))[1]
        process.runner.open()
        last.first()
        assert not process.running()


class TestSuspects:
    @pytest.fixture
    def hashes(self, process: Process) -> Hashes:
        """Those of a request, of which equal ones are suspect. It holds the runner."""
        whole, sample = process.digests(fp32(1, 2))
        process.runner.await_batches(1)
        process.find(suspects=[sample.hex()])
        # Later findings add to it.
        process.find(suspects=["00"])
        return whole, sample

    def test_one_runs_alone_and_is_no_suspect_afterwards(self, process: Process, hashes: Hashes) -> None:
        replies = [process.submit(x)[1] for x in (fp32(1, 2) + 1, fp32(1, 2), fp32(1, 2) + 1)]
        process.runner.release()
        process.runner.await_batches(2)
        process.runner.release()
        process.runner.await_batches(3)
        assert process.rows() == [1, 2, 1]
        assert process.running() == [Running(bytes(8), hashes[0], tried=True)]
        process.runner.release()
        for each in replies:
            response_of(each.first())
        process.submit(fp32(1, 2))
        process.runner.await_batches(4)
        assert process.running() == [Running(bytes(8), hashes[1], tried=False)]

    def test_others_wait_for_the_trial_and_get_their_answers(self, process: Process, hashes: Hashes) -> None:
        replies = [process.submit(fp32(1, 2))[1] for _ in range(3)]
        process.runner.open()
        for each in replies:
            assert response_of(each.first()).raw_output_contents[0] == fp32(1, 2).tobytes()

    def test_one_waits_until_all_processes_serve(self, process: Process, hashes: Hashes) -> None:
        process.all_serve = False
        waiting = process.submit(fp32(1, 2))[1]
        process.runner.open()
        # Others do not wait.
        response_of(process.submit(fp32(1, 2) + 1)[1].first())
        assert not waiting.all
        process.all_serve = True
        process.trial.processes_changed()
        response_of(waiting.first())

    def test_one_that_waits_can_be_cancelled_and_ends_with_the_server(
        self, process: Process, hashes: Hashes
    ) -> None:
        process.all_serve = False
        call, cancelled = process.submit(fp32(1, 2))
        call.cancel()
        call.cancel()
        assert isinstance(refusal(cancelled), Cancelled)
        left = process.submit(fp32(1, 2))[1]
        process.service.begin_drain()
        assert isinstance(refusal(left), NotReadyError)
        assert (len(cancelled.all), len(left.all)) == (1, 1)

    def test_too_many_are_refused_and_may_be_sent_again(
        self, process: Process, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(waiting_suspects, "_MOST", 1)
        process.all_serve = False
        call, _ = process.submit(fp32(1, 2))
        error = refusal(process.submit(fp32(1, 2))[1])
        assert isinstance(error, SuspectError)
        assert error.retry_after == 1.0
        call.cancel()
        assert not process.submit(fp32(1, 2))[1].all, "it waits in place of the cancelled one"

    @pytest.mark.parametrize("of_call", [True, False])
    def test_one_waits_at_most_until_its_deadline(
        self, process: Process, hashes: Hashes, of_call: bool
    ) -> None:
        process.all_serve = False
        microsecond = {"timeout": pb.InferParameter(int64_param=1)}
        limit = {"deadline": time.monotonic()} if of_call else {"parameters": microsecond}
        error = refusal(process.submit(fp32(1, 2), **limit)[1])
        assert isinstance(error, DeadlineExceeded)
        assert str(error) == "the deadline passed while the request waited to run alone"

    def test_one_of_a_sequence_is_refused_because_the_next_would_overtake_it(
        self, process: Process, hashes: Hashes
    ) -> None:
        process.runner.open()
        process.all_serve = False
        parameters = {
            "sequence_id": pb.InferParameter(int64_param=1),
            "sequence_start": pb.InferParameter(bool_param=True),
        }
        x = fp32(1, 2)
        process.find(suspects=[process.digests(x, "t")[1].hex()])
        error = refusal(process.submit(x, "t", parameters=parameters)[1])
        assert isinstance(error, SuspectError)
        response_of(process.submit(x + 1, "t", parameters=parameters)[1].first())

    def test_one_that_was_cancelled_before_it_ran_is_still_suspect(
        self, process: Process, hashes: Hashes
    ) -> None:
        call, replies = process.submit(fp32(1, 2))
        call.cancel()
        assert isinstance(refusal(replies), Cancelled)
        process.all_serve = False
        assert not process.submit(fp32(1, 2))[1].all


class TestRefusals:
    def test_equal_requests_are_refused_for_ten_minutes(self, process: Process) -> None:
        process.runner.open()
        whole, _ = process.digests(fp32(1, 2))
        process.find(refused=whole.hex())
        error = refusal(process.submit(fp32(1, 2), id="another")[1])
        assert isinstance(error, ModelFailedError)
        assert "this request ended the process that ran it" in str(error)
        response_of(process.submit(fp32(1, 2) + 1)[1].first())
        process.now += 600.0
        response_of(process.submit(fp32(1, 2))[1].first())

    def test_a_client_is_refused_at_one_model_for_a_time(
        self, process: Process, caplog: pytest.LogCaptureFixture
    ) -> None:
        process.runner.open()
        process.find(client=owner_of("ann", "m").hex(), client_until=process.now + 60.0)
        process.now += 50.0
        error = refusal(process.submit(fp32(1, 2), caller=ANN)[1])
        assert isinstance(error, LimitError)
        assert "of this client to model 'm' ended server processes: send no more for 10 s" in str(error)
        assert "a request of client 'ann' to model m is refused" in caplog.text
        for caller, model in ((ANN, "n"), (BOB, "m"), (ANONYMOUS, "m")):
            response_of(process.submit(fp32(1, 2), model, caller)[1].first())
        process.now += 10.0
        response_of(process.submit(fp32(1, 2), caller=ANN)[1].first())


def test_one_that_waits_is_run_when_it_is_suspect_no_more(tmp_path: Path) -> None:
    """Also if a process cannot be started, so that no suspect is tried."""
    waiting, ran = waiting_suspects.WaitingSuspects(TrialLock(tmp_path, lambda: False)), list[int]()

    def run() -> InferenceCall:
        ran.append(1)
        return InferenceCall()

    waiting.put(run, lambda error: pytest.fail(str(error)), math.inf, 10.0)
    assert waiting.check(9.0) == 10.0
    assert not ran
    assert waiting.check(10.0) is None
    assert ran == [1]
