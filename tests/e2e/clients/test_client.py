"""The bundled client against a real server: Python, asyncio, and the shell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from support.processes.faulty import HANG
from support.processes.metrics import scrape_until
from support.processes.probe import TABLE_ERROR, inputs
from support.processes.server import ServerProcess

from tensorferry.client import (
    DeadlineExceeded,
    InferenceClient,
    InferenceError,
    InferenceResult,
    Internal,
    InvalidArgument,
    InvalidInput,
    NotFound,
    ResourceExhausted,
    StreamRequest,
    aio,
)


def test_infer_submit_and_errors(plain: ServerProcess) -> None:
    server = plain
    with InferenceClient(server.address) as client:
        assert client.is_live()
        assert client.is_ready()
        assert client.is_model_ready("probe")
        assert not client.is_model_ready("other")
        result = client.infer("probe", inputs(7, index=3), request_id="a", parameters={"explain": True})
        np.testing.assert_array_equal(result["y"], np.full((1, 4), 17))
        assert (result.id, result.model_name, result.model_version) == ("a", "probe", "1")
        assert result.parameters["batch_rows"] == 1
        futures = [client.submit("probe", inputs(tag)) for tag in range(100)]
        for tag, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(30)["y"], np.full((1, 4), 2 * tag))
        with pytest.raises(InvalidInput, match=r"expects FP32"):
            client.infer("probe", {**inputs(1), "x": np.ones((1, 4))})
        with pytest.raises(NotFound):
            client.infer("other", inputs(1))
        with pytest.raises(Internal, match="Gather node"):
            client.infer("probe", inputs(1, index=99))
        with server.standing_still(), pytest.raises(DeadlineExceeded):
            client.infer("probe", inputs(1), timeout=0.2)
    with InferenceClient(server.address, check=False) as client, pytest.raises(InvalidArgument):
        client.infer("probe", {"x": np.ones((1, 4), np.float32)})


@pytest.mark.parametrize("ordered", [False, True], ids=["completion", "request"])
def test_stream(plain: ServerProcess, ordered: bool) -> None:
    requests = (
        StreamRequest(inputs(tag, index=99 if tag == 57 else 0), request_id=str(tag)) for tag in range(300)
    )
    with InferenceClient(plain.address) as client:
        outcomes = list(client.stream("probe", requests, ordered=ordered, timeout=60, on_error="yield"))
    ids = []
    for outcome in outcomes:
        if isinstance(outcome, InferenceError):
            assert (outcome.request_id, TABLE_ERROR in str(outcome)) == ("57", True)
            ids.append(57)
        else:
            ids.append(int(outcome.id))
            np.testing.assert_array_equal(outcome["y"], np.full((1, 4), 2 * int(outcome.id)))
    assert sorted(ids) == list(range(300))
    assert not ordered or ids == list(range(300))


def test_results_come_as_they_finish(serve_faulty: Serve, tmp_path: Path) -> None:
    """While a slow request keeps the device busy, the error of another does not wait for it; in
    request order it does.
    """

    release = tmp_path / "release"
    server = serve_faulty("--metrics-port", "0", FAULTY_RELEASE=str(release))

    def name(outcome: InferenceResult | InferenceError) -> str:
        return outcome.request_id if isinstance(outcome, InferenceError) else outcome.id

    with InferenceClient(server.address, check=False) as client, ThreadPoolExecutor(1) as consumer:
        wrong = StreamRequest({"x": np.ones((1, 4), np.float32)}, request_id="wrong")
        slow = StreamRequest({**inputs(1), "x": np.full((1, 4), HANG, np.float32)}, request_id="slow")
        both = [slow, wrong]
        outcomes = client.stream("probe", both, timeout=60, on_error="yield")
        assert name(next(outcomes)) == "wrong"
        release.touch()
        assert [name(outcome) for outcome in outcomes] == ["slow"]
        release.unlink()
        consumed = consumer.submit(
            list, client.stream("probe", both, ordered=True, timeout=60, on_error="yield")
        )
        scrape_until(server, lambda found: found["tensorferry_calls_refused_total"] == 2)
        release.touch()
        assert [name(outcome) for outcome in consumed.result(60)] == ["slow", "wrong"]


IMAGES = np.random.default_rng(3).integers(0, 17, (1000, 8, 8), np.uint8)


def assert_joined(result: InferenceResult, expected: InferenceResult) -> None:
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name], array)


async def test_parts_give_the_results_of_the_whole(
    serve: Serve, plain: ServerProcess, digits_model: Path
) -> None:
    with InferenceClient(plain.address) as client:
        expected = client.infer("digits", {"image": IMAGES})
    for limit in ("--max-request-rows", "100"), ("--max-message-bytes", "16KiB"):
        limited = serve(f"digits={digits_model}", *limit)
        with InferenceClient(limited.address) as client:
            assert_joined(client.infer("digits", {"image": IMAGES}, timeout=60), expected)
            [statistics] = client.statistics("digits")
            assert statistics.success.count >= 4
            with pytest.raises((InvalidArgument, ResourceExhausted)):
                client.submit("digits", {"image": IMAGES}).result(60)
        async with aio.InferenceClient(limited.address) as aclient:
            assert_joined(await aclient.infer("digits", {"image": IMAGES}, timeout=60), expected)
            assert_joined(await aclient.submit("digits", {"image": IMAGES}, timeout=60), expected)
