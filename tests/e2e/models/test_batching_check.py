"""Clients of a server see the verdict, and their answers do not depend on other requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from e2e.fixtures import Serve
from support.models import hidden_mixing, mixing, small
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checked")
    found = [
        small.twice(folder / "twice.onnx"),
        mixing.hashed(folder / "hashed.onnx"),
        mixing.scaled(folder / "scaled.onnx"),
        small.twice(folder / "fixed.onnx", dims=(1, 3)),
        mixing.log_mel(folder / "mel.onnx"),
        *(hidden_mixing.save(folder / f"{kind}.onnx", kind) for kind in hidden_mixing.KINDS),
    ]
    return {path.stem: path for path in found}


@pytest.fixture(scope="module")
def server(share: Serve, paths: dict[str, Path]) -> ServerProcess:
    return share(*paths.values())


def test_the_verdict_is_in_the_ready_line_and_the_metadata(server: ServerProcess) -> None:
    ready = {model["name"]: model["batching"] for model in server.ready["models"]}
    verdicts = {"twice": "proved", "hashed": "tested", "scaled": "refused", "fixed": "proved"}
    assert {name: ready[name] for name in verdicts} == {
        "twice": "batches of up to 32 rows (proved)",
        "hashed": "batches of up to 32 rows (tested)",
        "scaled": "unbatched (ReduceMax greatest reduces over the batch axis)",
        "fixed": "batches of up to 32 rows (proved, rewritten)",
    }
    with InferenceClient(server.address) as client:
        for name, verdict in verdicts.items():
            properties = client.metadata(name).properties
            assert properties["batching"] == ready[name]
            assert properties["batching_verdict"] == verdict
            # Only a request for independent rows may be split.
            assert ("max_request_rows" in properties) == (verdict in ("proved", "tested"))


def test_a_model_with_a_floor_over_the_batch_answers_each_request_correctly(
    server: ServerProcess, paths: dict[str, Path]
) -> None:
    """Whisper's features have such a floor: a request with large values would raise it for the others."""
    session = onnxruntime.InferenceSession(str(paths["mel"]))
    generator = np.random.default_rng(1)
    requests = [
        (generator.random((1, 3)) * scale).astype(np.float32)
        for scale in (1e-6, 1e6, 1, 1e-3)
        for _ in range(20)
    ]
    with InferenceClient(server.address) as client:
        futures = [client.submit("mel", {"x": x}) for x in requests]
        for x, future in zip(requests, futures, strict=True):
            np.testing.assert_array_equal(future.result(30)["y"], session.run(None, {"x": x})[0])


def test_no_answer_has_a_number_of_another_request_where_rows_mix_for_few_numbers(
    server: ServerProcess, paths: dict[str, Path]
) -> None:
    """Running random rows cannot find that these models mix rows; their graphs show it."""
    rows = np.random.default_rng(1).standard_normal((160, 1, 4)).astype(np.float32)
    rows[::8, 0, 0] = hidden_mixing.MIXING
    with InferenceClient(server.address) as client:
        answers = {}
        for kind in hidden_mixing.KINDS:
            assert client.metadata(kind).properties["batching_verdict"] == "refused"
            futures = [client.submit(kind, {"x": x}) for x in rows]
            answers[kind] = np.stack([future.result(30)["y"] for future in futures])
    # Each request that draws a number has its own.
    drawn = answers.pop("random")[::8, 0, 0]
    assert len(set(drawn.tolist())) == len(drawn)
    for kind, given in answers.items():
        session = onnxruntime.InferenceSession(str(paths[kind]))
        right = np.stack([session.run(None, {"x": x})[0] for x in rows])
        np.testing.assert_array_equal(given, right, err_msg=kind)
