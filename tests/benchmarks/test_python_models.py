"""Benchmark of Python around models: differences, ratios, requests, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from python_models import images, steps, text
from python_models.calls import Call
from python_models.plan import FUNCTIONS, PART, SERVERS, visits
from python_models.report import SECTION, all_ratios, generated
from serving.peers.settings import Engine
from serving.plan import UNARY
from serving.probe import WrongAnswer, compare
from serving.reporting.ratios import Ratio
from serving.servers import BENTOML, LANE, LITSERVE, MOSEC, TRITON
from tensorferry.protos import inference_pb2 as pb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "python_models.md"


def pair(number: int, server: str, model: str, at: int, batch: float, request: float) -> dict[str, Any]:
    return {
        "part": steps.PART,
        "round": number,
        "server": server,
        "model": model,
        "pair": at,
        "batch_us": batch,
        "request_us": request,
        "other_cores": 0.0,
    }


def pairs(server: str, *costs: float, model: str = steps.STEP) -> list[dict[str, Any]]:
    """Pairs of one round in which the model costs so much more, while the machine becomes slower."""
    found = []
    for at, cost in enumerate(costs):
        slower = 100.0 * at
        found += [
            pair(0, server, steps.WITHOUT, at, 200 + slower, 20 + slower),
            pair(0, server, model, at, 200 + slower + cost, 20 + slower + cost / 32),
        ]
    return found


def function(server: str, callers: int, rate: float, name: str = "tanh") -> dict[str, Any]:
    return {
        "part": PART,
        "round": 0,
        "server": server,
        "workload": name,
        "pattern": UNARY,
        "in_flight": callers,
        "share": 0.0,
        "rate": rate,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "cpu_us_per_answer": 30.0,
        "mean_rows": 16.0,
        "memory_mib": 80.0,
        "start_seconds": 0.5,
        "other_cores": 0.0,
    }


def image(processes: int, rate: float, busy: float) -> dict[str, Any]:
    told = {"part": images.PART, "round": 0, "processes": processes, "rate": rate, "busy": busy}
    return {**told, "p50_ms": 80.0, "p99_ms": 90.0, "server_cores": 2.0, "other_cores": 0.1}


def embedded(kind: str | int, model: str, rate: float) -> dict[str, Any]:
    told = {"part": text.PART, "round": 0, "lengths": kind, "model": model, "rate": rate}
    return {**told, "p50_ms": 80.0, "p99_ms": 90.0, "cpu_us_per_answer": 5000.0, "other_cores": 0.5}


def found(rows: list[dict[str, Any]], name: str, over: str) -> Ratio:
    (ratio,) = [ratio for ratio in all_ratios(rows) if (ratio.name, ratio.over) == (name, over)]
    return ratio


def results(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    machine = {
        "processor": "a processor",
        "cores": 2,
        "memory_gib": 24,
        "system": "Linux 6",
        "python": "3.11",
    }
    return {
        "date": "2026-11-23",
        "command": "make bench-python",
        "rounds": 1,
        "minutes": 4.0,
        "machine": {**machine, "versions": {"numpy": "2.4"}, "peers": {"litserve": "litserve==0.2.19 numpy"}},
        "measurements": rows,
        "missing": {"mosec": "it is not installed"},
        "failures": [{"round": 0, "server": BENTOML, "model": "tanh", "reason": "no answer"}],
    }


def test_the_cost_of_a_step_is_the_median_difference_within_pairs() -> None:
    rows = pairs(steps.OURS, 30.0, 500.0, 34.0)
    assert steps.differences(rows, steps.OURS, steps.STEP, "batch_us") == {0: 34.0}
    assert steps.differences(rows, TRITON, steps.STEP, "batch_us") == {}


def test_a_pair_without_its_other_half_is_left_out() -> None:
    rows = [*pairs(steps.OURS, 30.0), pair(0, steps.OURS, steps.STEP, 1, 900.0, 90.0)]
    assert steps.differences(rows, steps.OURS, steps.STEP, "batch_us") == {0: 30.0}


def test_steps_are_compared_with_triton_at_least_at_the_resolution() -> None:
    rows = [*pairs(steps.OURS, 32.0), *pairs(TRITON, 320.0)]
    name = "cost of an empty step, batch of 32 rows"
    assert found(rows, name, "1 µs").values == [32.0]
    assert found(rows, f"{TRITON}'s ensemble: {name}", "tensorferry's").values == [10.0]
    rows = [*pairs(steps.OURS, -5.0), *pairs(TRITON, 320.0)]
    assert found(rows, name, "1 µs").values == [-5.0]
    assert found(rows, f"{TRITON}'s ensemble: {name}", "tensorferry's").values == [320.0]


def test_functions_are_compared_with_peers_in_the_same_load() -> None:
    rows = [function(LANE, 32, 9000.0), function(LITSERVE, 32, 1000.0), function(LITSERVE, 128, 10.0)]
    name = "calls/s, function `tanh`, 32 in flight"
    assert found(rows, name, LITSERVE).values == [9.0]
    assert found(rows, name, BENTOML).verdict == "not measured"
    assert found([*rows, function(MOSEC, 32, 9000.0)], name, MOSEC).verdict == "–"


def test_text_is_compared_with_the_encoder_and_with_arrival_order() -> None:
    rows = [
        embedded(text.EQUAL, text.ENCODER, 200.0),
        embedded(text.EQUAL, text.EMBED, 190.0),
        embedded(text.MIXED, text.EMBED, 150.0),
        embedded(text.MIXED, text.ARRIVAL, 100.0),
        embedded(256, text.EMBED, 120.0),
        embedded(256, text.ARRIVAL, 80.0),
    ]
    assert found(rows, "texts/s, tokenizer and encoder", "the encoder alone").values == [0.95]
    assert found(rows, "texts/s, mixed lengths, batches by length", "arrival order").values == [1.5]
    assert found(rows, "texts/s, calls of 256 texts, sorted by length", "arrival order").values == [1.5]


def test_the_page_has_a_table_for_each_part() -> None:
    page = generated(
        results(
            [
                function(LANE, 32, 9000.0),
                function(LITSERVE, 32, 1000.0),
                *pairs(steps.OURS, 30.0),
                image(1, 200.0, 0.5),
                image(4, 600.0, 0.9),
                image(images.NO_DECODING, 700.0, 1.0),
                embedded(text.EQUAL, text.ENCODER, 200.0),
                embedded(1024, text.ARRIVAL, 70.0),
            ]
        )
    )
    assert "| calls/s, function `tanh`, 32 in flight ÷ LitServe | ≥ 3 | 9.00 (9.00–9.00) | yes |" in page
    assert "| tensorferry, with a step between | 230.0 | 20.94 | +30.00 | +0.94 |" in page
    assert "| 4 processes | 600 | 3.00 | 90% | 2.00 | 80.0 | 90.0 |" in page
    assert "| 32 tokens each, encoder alone | 200.0 |" in page
    assert "| mixed lengths, 1024 a call, arrival order | 70.0 |" in page
    assert "mosec, because it is not installed" in page
    assert "BentoML failed: no answer" in page
    assert "litserve 0.2.19" in page.splitlines()[0]


def test_the_page_has_its_generated_section() -> None:
    assert "new text" in SECTION.replaced(PAGE.read_text(), "new text")


@pytest.mark.parametrize("workload", FUNCTIONS, ids=lambda workload: workload.name)
def test_every_server_runs_the_function_of_the_file(workload: Any) -> None:
    engine = Engine(workload.path(Path("no-cache")))
    row = workload.row()
    assert engine.input.shape == ["n", workload.width]
    expected = row if workload.name == "empty" else np.tanh(row @ engine._compute.__globals__["_WEIGHTS"])
    np.testing.assert_allclose(engine.run(row), expected)


def test_every_server_is_visited_with_every_function_in_alternating_order() -> None:
    for server in SERVERS:
        first, second = visits(0, server), visits(1, server)
        assert [visit.model for visit in first] == [visit.model for visit in reversed(second)]
        assert {visit.model for visit in first} == {workload.model for workload in FUNCTIONS}


def test_a_call_carries_files_as_they_are() -> None:
    call = Call("classify", {"jpeg": np.array([b"\xff\xd8\0\0"], object)}, np.zeros((1, 2), np.float32))
    request = pb.ModelInferRequest.FromString(call.message())
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1])
    assert request.raw_input_contents[0] == b"\4\0\0\0\xff\xd8\0\0"


def test_a_large_call_has_the_texts_of_others_with_their_answers() -> None:
    some = [
        Call(text.EMBED, {"text": np.array([word], object)}, np.full((1, 2), at))
        for at, word in enumerate("ab")
    ]
    call = text.large(some, 3)
    assert (call.model, call.inputs["text"].tolist()) == (text.EMBED, ["a", "b", "a"])
    assert call.answer.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_a_wrong_answer_is_told_by_size_or_value() -> None:
    right = np.ones(3, np.float32)
    compare(right + np.float32(1e-5), right)
    with pytest.raises(WrongAnswer, match="2 values, not of 3"):
        compare(right[:2], right)
    with pytest.raises(WrongAnswer, match="off by 1"):
        compare(right + 1, right)


def test_mixed_texts_have_all_lengths_and_equal_texts_one() -> None:
    mixed = text.lengths(text.MIXED)
    assert min(mixed) < 8
    assert max(mixed) > 120
    assert set(text.lengths(text.EQUAL)) == {text.EQUAL_TOKENS}
    # The tokenizer adds two tokens to a text.
    assert [len(words.split()) for words in text.texts([3, 10])] == [1, 8]
