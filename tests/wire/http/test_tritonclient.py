"""tritonclient's clients of HTTP, unchanged, against a real server: inference in every form, and its errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from e2e.fixtures import Serve
from support.processes import models
from support.processes.faulty import HANG
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess, running
from support.wire.http_inputs import Ask, probe, refusal, tensor, wanted
from support.wire.inputs import DATATYPES

# tritonclient refuses to send these as JSON.
BINARY_ONLY = ("FP16", "BF16")


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path, digits_model: Path, probe_model: Path) -> Iterator[ServerProcess]:
    echoes = models.echoes(model_dir, *DATATYPES)
    # Room for 3,000 rows in each of two processes.
    options = ("--priority-weights", "8,1", "--max-queue-size", "8192", "--http-port", "0")
    with running(f"digits={digits_model}", probe_model, *echoes, *options, transport=transport) as server:
        yield server


@pytest.mark.parametrize("rows", [0, 1, 3, 3000])
async def test_binary_and_json_in_and_out(ask: Ask, rows: int) -> None:
    for binary_in in (True, False):
        for outputs in (None, wanted("y", binary_data=True), wanted("y", binary_data=False)):
            result = await ask("infer", "probe", probe(2, 1, rows=rows, binary=binary_in), outputs=outputs)
            np.testing.assert_array_equal(result.as_numpy("y"), np.full((rows, 4), 5, np.float32))
            (output,) = result.get_response()["outputs"]
            # Without named outputs this client asks for binary ones.
            in_json = outputs is not None and not outputs[0]._get_tensor()["parameters"]["binary_data"]
            assert ("data" in output) is in_json
            assert in_json or output["parameters"]["binary_data_size"] == 16 * rows


@pytest.mark.parametrize("name", DATATYPES)
async def test_every_datatype(ask: Ask, name: str) -> None:
    if name == "BYTES":
        array = np.array([["", "plain", "zwölf"], ['a\0"b', "line\n", "終"]], dtype=object)
    else:
        array = np.array([[0, 1, 2], [1, 0, 100]]).astype(DATATYPES[name])
    for binary_in in (True,) if name in BINARY_ONLY else (True, False):
        for binary_out in (True, False):
            given, output = tensor("x", array, name, binary=binary_in), wanted("y", binary_data=binary_out)
            got = (await ask("infer", f"echo-{name}", [given], outputs=output)).as_numpy("y")
            if name == "BYTES" and binary_out:
                got = np.vectorize(bytes.decode, otypes=[object])(got)
            np.testing.assert_array_equal(got, array)


async def test_numbers_that_json_does_not_have(ask: Ask) -> None:
    array = np.array([[np.nan, np.inf, -np.inf, 3.4028234663852886e38, -0.0]], np.float32)
    given, output = tensor("x", array, "FP32", binary=False), wanted("y", binary_data=False)
    got = (await ask("infer", "echo-FP32", [given], outputs=output)).as_numpy("y")
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_requests_and_responses(ask: Ask, coding: str) -> None:
    codings = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    for binary in (True, False):
        given, output = probe(3, rows=2000, binary=binary), wanted("y", binary_data=binary)
        got = (await ask("infer", "probe", given, outputs=output, **codings)).as_numpy("y")
        np.testing.assert_array_equal(got, np.full((2000, 4), 6, np.float32))


@pytest.mark.parametrize("binary", [True, False])
async def test_classes_and_several_outputs_in_the_requested_order(ask: Ask, binary: bool) -> None:
    image = tensor("image", np.zeros((2, 8, 8), np.uint8), "UINT8")
    outputs = wanted("probabilities", class_count=3, binary_data=binary) + wanted("label")
    result = await ask("infer", "digits", [image], outputs=outputs)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["probabilities", "label"]
    classes = result.as_numpy("probabilities")
    assert classes.shape == (2, 3)
    best = classes[0, 0].decode() if binary else classes[0, 0]
    assert best.partition(":")[2] == str(result.as_numpy("label")[0])


async def test_ids_versions_parameters_and_priorities(ask: Ask) -> None:
    # Twice, because what was parsed for the first must not answer for the second.
    for request_id in ("seven", 'a "quoted" \\ 終\n'):
        result = await ask(
            *("infer", "probe", probe(1)),
            model_version="1",
            request_id=request_id,
            priority=2,
            timeout=60_000_000,
            parameters={"explain": True, "key": "value", "number": 3, "fraction": 0.5},
            query_params={"a": "b c"},
        )
        response = result.get_response()
        assert (response["id"], response["model_version"]) == (request_id, "1")
        assert response["parameters"]["priority"] == 2
    assert "parameters" not in (await ask("infer", "probe", probe(1))).get_response()


@pytest.mark.parametrize(
    ("model", "inputs", "options", "status", "message"),
    [
        ("other", [], {}, "404", "unknown model: 'other'"),
        ("with blank", [], {}, "404", "unknown model: 'with blank'"),
        ("probe", probe()[:2], {}, "400", "missing required input(s) ['index']"),
        ("probe", probe(), {"parameters": {"key": [1]}}, "400", "parameter 'key' has invalid type"),
        ("probe", probe(), {"headers": {"Content-Encoding": "br"}}, "415", "gzip and deflate"),
        ("probe", probe(), {"timeout": 1}, "504", "Request timeout expired"),
        ("probe", probe(), {"headers": {"X-Request-Timeout": "1e-6"}}, "504", "Request timeout expired"),
        ("probe", probe(index=99), {}, "500", TABLE_ERROR),
    ],
)
async def test_errors(
    ask: Ask, model: str, inputs: list[Any], options: dict[str, Any], status: str, message: str
) -> None:
    found = await refusal(ask("infer", model, inputs, **options))
    assert found[0] == status
    assert message in found[1]
    assert (await ask("infer", "probe", probe(4))).as_numpy("y")[0, 0] == 8


@pytest.mark.filterwarnings("ignore:Sending a large body directly")
async def test_a_request_that_is_too_large_is_answered_before_it_is_read(ask: Ask) -> None:
    """The client reads the error after it has sent everything, which must not fail."""
    large = tensor("x", np.zeros((1, 17 << 20), np.float32), "FP32")
    status, message = await refusal(ask("infer", "echo-FP32", [large]))
    assert status == "413"
    assert "--max-message-bytes" in message


def test_many_calls_of_one_client_at_once(server: ServerProcess) -> None:
    address = server.ready["http"].removeprefix("http://")
    with triton.InferenceServerClient(address, concurrency=8) as client:
        calls = [client.async_infer("probe", probe(tag), request_id=str(tag)) for tag in range(64)]
        for tag, call in enumerate(calls):
            result = call.get_result()
            assert result.get_response()["id"] == str(tag)
            np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, 4), 2 * tag))


async def test_a_full_queue(serve_faulty: Serve, tmp_path: Path) -> None:
    release, options = tmp_path / "release", ("--max-batch-size", "1", "--max-queue-size", "2")
    server = serve_faulty(*options, "--http-port", "0", FAULTY_RELEASE=str(release))
    async with triton_aio.InferenceServerClient(server.ready["http"].removeprefix("http://")) as client:
        # Two wait, and one may run, until they are released, so the others find no room.
        calls = [asyncio.create_task(client.infer("probe", probe(int(HANG)))) for _ in range(6)]
        for call in itertools.islice(asyncio.as_completed(calls), 3):
            status, message = await refusal(call)
            assert status == "429"
            assert "Exceeds maximum queue size" in message
        release.touch()
        ended = await asyncio.gather(*calls, return_exceptions=True)
    answers = [result.as_numpy("y")[0, 0] for result in ended if isinstance(result, triton.InferResult)]
    assert answers in ([2 * HANG] * 2, [2 * HANG] * 3)
