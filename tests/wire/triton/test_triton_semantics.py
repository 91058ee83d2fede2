"""Parameters, streams and overload as Triton's clients expect them, with tritonclient and with plain
messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from support.processes.faulty import HANG
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess, running
from support.wire.inputs import probe
from support.wire.rig import PATIENCE, Answers, Stream
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException


@pytest.fixture
def server(plain: ServerProcess) -> ServerProcess:
    return plain


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    """For requests that tritonclient refuses to send."""
    with grpc.insecure_channel(server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message(request_id: str = "", **parameters: Any) -> Any:
    """Return a good request to the probe model, with parameters in the field `KIND_param` given with
    each value.
    """
    request = pb.ModelInferRequest(model_name="probe", id=request_id)
    for given in probe(3):
        request.inputs.append(given._get_tensor())
        request.raw_input_contents.append(given._get_content())
    for key, (kind, value) in parameters.items():
        setattr(request.parameters[key], kind, value)
    return request


@pytest.mark.parametrize("sequence", [42, "e333c95a-07fc-42d2-ab16-033b1a566ed5"])
def test_the_parameters_of_a_sequence_mean_nothing_to_a_model_without_sequences(
    client: triton.InferenceServerClient, sequence: int | str
) -> None:
    for tag, (start, end) in enumerate([(True, False), (False, False), (False, True)]):
        result = client.infer(
            "probe", probe(tag), sequence_id=sequence, sequence_start=start, sequence_end=end
        )
        np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, 4), 2 * tag))


@pytest.mark.parametrize("empty_final", [False, True])
def test_a_model_that_answers_in_streams_is_decoupled(
    transport: str, tmp_path: Path, empty_final: bool
) -> None:
    (tmp_path / "app.py").write_text(
        "from tensorferry.serving import INT32, model\n"
        "@model(inputs={'count': INT32[1]}, outputs={'number': INT32[1]}, streams=True)\n"
        "def counting(count):\n"
        "    for number in range(count[0]):\n"
        "        yield [number]\n"
    )
    count = triton.InferInput("count", [1], "INT32")
    count.set_data_from_numpy(np.array([3], np.int32))
    with running(tmp_path / "app.py", transport=transport) as server:
        client = triton.InferenceServerClient(server.address)
        assert client.get_model_config("counting").config.model_transaction_policy.decoupled
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled"):
            client.infer("counting", [count])
        with Stream(client) as stream:
            for request_id in ("first", "second"):
                stream.send("counting", [count], request_id, enable_empty_final_response=empty_final)
                for number in range(3):
                    result = stream.result()
                    response = result.get_response()
                    assert (response.id, result.as_numpy("number").tolist()) == (request_id, [number])
                    assert not response.parameters["triton_final_response"].bool_param
                if empty_final:
                    last = stream.result().get_response()
                    assert last.parameters["triton_final_response"].bool_param
                    assert (last.id, last.model_name, len(last.outputs)) == (request_id, "counting", 0)


def test_a_unary_response_has_no_parameter_of_streams(client: triton.InferenceServerClient) -> None:
    assert not client.infer("probe", probe(1)).get_response().parameters


def test_an_error_in_a_stream_has_the_id_and_the_model_of_its_request(stub: Any) -> None:
    """With the plain message, because tritonclient drops them."""
    bad_index = message("failing")
    bad_index.raw_input_contents[2] = np.array([99]).tobytes()
    unknown = message("unknown")
    unknown.model_name = "other"
    missing = message("missing")
    missing.model_version = "9"
    short = message("short")
    short.raw_input_contents.pop()
    sent = [bad_index, unknown, missing, short, message("good"), bad_index]
    answers = list(stub.ModelStreamInfer(iter(sent), timeout=PATIENCE))
    assert [answer.infer_response.id for answer in answers] == [request.id for request in sent]
    # The version that served the request; without one, the version in the request.
    assert [
        (answer.infer_response.model_name, answer.infer_response.model_version) for answer in answers
    ] == [("probe", "1"), ("other", ""), ("probe", "9"), ("probe", "1"), ("probe", "1"), ("probe", "1")]
    assert TABLE_ERROR in answers[0].error_message
    assert "Request for unknown model: 'other' is not found" in answers[1].error_message
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)


@pytest.mark.parametrize(
    ("flags", "full", "late"),
    [
        ([], "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
        (["--triton-status-codes"], "UNAVAILABLE", "UNAVAILABLE"),
    ],
    ids=["ours", "Triton's"],
)
def test_overload(serve_faulty: Serve, tmp_path: Path, flags: list[str], full: str, late: str) -> None:
    release = tmp_path / "release"
    options = ("--max-batch-size", "1", "--max-queue-size", "2")
    server = serve_faulty(*flags, *options, FAULTY_RELEASE=str(release))
    with triton.InferenceServerClient(server.address) as client:
        with Stream(client, headers={"triton_grpc_error": "true"}) as stream:
            stream.send("probe", probe(1), "1", timeout=1)
            assert stream.error().status() == f"StatusCode.{late}"
        assert expired(client) == f"StatusCode.{late}"
        assert overloaded(client) == f"StatusCode.{full}"
        release.touch()


def overloaded(client: triton.InferenceServerClient) -> str:
    """Return the status of a request that meets a full queue."""
    answers = Answers()
    # One runs and two wait, so the others find no room.
    calls = [client.async_infer("probe", probe(int(HANG)), answers.put) for _ in range(6)]
    error = answers.error()
    assert "Exceeds maximum queue size" in error.message()
    assert "2 of 2 rows wait" in error.message()
    for call in calls:
        call.cancel()
    for _ in calls[1:]:
        answers.next()
    return str(error.status())


def expired(client: triton.InferenceServerClient) -> str:
    """Return the status of a request that expires in the queue while the one before it runs."""
    answers = Answers()
    running = client.async_infer("probe", probe(int(HANG)), answers.put)
    error = None
    while error is None:
        # Requests with a deadline go first, so this one overtakes a request that has not begun.
        client.async_infer("probe", probe(2), answers.put, timeout=10_000)
        _, error = answers.next()
    assert "Request timeout expired" in error.message()
    running.cancel()
    assert answers.error().status() == "StatusCode.CANCELLED"
    return str(error.status())
