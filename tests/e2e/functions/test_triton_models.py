"""Models of Triton's Python backend (`class TritonPythonModel`), unchanged, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE, until
from support.processes.server import ServerProcess, running

from tensorferry.client import (
    InferenceClient,
    InferenceError,
    InferenceResult,
    Internal,
    InvalidArgument,
    NotFound,
)

# The inputs of a request are scaled in place, as models do. `notes` gets what finalize has to say.
_SCALE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.config = config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "y")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.factor = float(config["parameters"]["factor"]["string_value"])
        self.args = args
        assert output["dims"] == [-1] and config["max_batch_size"] == 4
        assert not pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            assert pb_utils.get_input_tensor_by_name(request, "z") is None
            if np.isnan(x).any():
                raise pb_utils.TritonModelException("NaN is no number")
            if (x < 0).any():
                error = pb_utils.TritonError("x is negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if (x > 99).any():
                error = pb_utils.TritonError("x is too large", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            if (x == 13).any():
                return responses
            if (x == 14).any():
                x = x[:, :1].copy()
            if (x == 15).any():
                x = x[1:].copy()
            if (x == 16).any():
                x = np.repeat(x, 2, axis=0)
            if (x == 17).any():
                raise KeyError("/etc/secret")
            x *= self.factor
            count = np.full((len(x), 1), len(requests), np.int32)
            y = pb_utils.Tensor("y", x.astype(self.dtype))
            assert (y.shape(), y.triton_dtype()) == ([*x.shape], 12)
            # A capsule, and what has one.
            y = pb_utils.Tensor.from_dlpack("y", pb_utils.Tensor.from_dlpack("y", y.to_dlpack()))
            outputs = [y, pb_utils.Tensor("requests", count)]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses

    def finalize(self):
        with open(self.config["parameters"]["notes"]["string_value"], "a") as file:
            print(self.args["model_name"], self.args["model_version"], file=file)
"""
_SCALE_CONFIG = """
backend: "python" max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
input {{ name: "x" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "y" data_type: TYPE_FP64 dims: -1 }} output {{ name: "requests" data_type: TYPE_INT32 dims: 1 }}
parameters {{ key: "factor" value {{ string_value: "3" }} }}
parameters {{ key: "notes" value {{ string_value: "{notes}" }} }}
"""

# Without a config.pbtxt.
_GREET = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        assert not config["input"] and config["name"] == "greet"
        auto_complete_model_config.add_input({"name": "name", "data_type": "TYPE_STRING", "dims": [1]})
        auto_complete_model_config.add_output({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(request, "name").as_numpy() for request in requests]
        texts = [np.array([[b"hello " + name[0]] for name in each]) for each in names]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text", text)]) for text in texts]
"""

# Calls "scale" twice at the same time, then once.
_CALLS = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

def request(x, name="scale"):
    return pb_utils.InferenceRequest(
        model_name=name, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]
    )

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for each in requests:
            x = pb_utils.get_input_tensor_by_name(each, "x").as_numpy()
            if x[0, 0] == 60:
                pb_utils.InferenceRequest(model_name="scale", requested_output_names=["y"], inputs=[], correlation_id=7)
            first, second = await asyncio.gather(
                request(x).async_exec(), request(x + 1, b"scale").async_exec()
            )
            third = request(x, "missing" if x[0, 0] == 50 else "scale").exec()
            for found in (first, second, third):
                if found.has_error():
                    raise pb_utils.TritonModelException(found.error().message())
            values = [pb_utils.get_output_tensor_by_name(found, "y").as_numpy() for found in (first, second, third)]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.concatenate(values, 1))]))
        return responses
"""
_CALLS_CONFIG = """
backend: "python" max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP64 dims: 3 }
"""

# Answers from a thread that goes on after `execute`. It writes to an array that it has sent.
_COUNTS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])
        array = np.empty(1, np.int32)
        for number in range(abs(count)):
            array[0] = number
            response = pb_utils.InferenceResponse([pb_utils.Tensor("number", array)])
            if count < 0 and number == 2:
                response = pb_utils.InferenceResponse(error=pb_utils.TritonError("no more"))
            last = number == count - 1 and count % 2
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
            if last:
                return
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_COUNTS_CONFIG = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "count" data_type: TYPE_INT32 dims: 1 } output { name: "number" data_type: TYPE_INT32 dims: 1 }
"""

# Answers once, with rows, then waits until nobody reads. Notes that in a file of its directory.
_WAITS = """
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        count = pb_utils.get_input_tensor_by_name(requests[0], "count").as_numpy()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("number", count)]))
        while not sender.is_cancelled():
            time.sleep(0.001)
        with open(Path(__file__).with_name("cancelled"), "a") as file:
            print(requests[0].is_cancelled(), file=file)
"""

# Answers each row with what its request has beside its tensors, and with the sum of its rows.
_TELLS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            about = [request.request_id(), json.loads(request.parameters()), float(x.sum())]
            said = np.full((len(x), 1), json.dumps(about).encode(), object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("said", said)]))
        return responses
"""
_TELLS_CONFIG = """
backend: "python" max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 600000000 }
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "said" data_type: TYPE_STRING dims: 1 }
"""
_TOLD_CONFIG = """
platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "said" data_type: TYPE_STRING dims: 1 }
ensemble_scheduling { step {
  model_name: "tells" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "said" value: "said" }
} }
"""


def written(root: Path, name: str, code: str, config: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(code)
    if config:
        (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def notes(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(transport) / "notes"


@pytest.fixture(scope="module")
def models(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(transport: str, notes: Path, models: Path) -> Iterator[ServerProcess]:
    root = models
    written(root, "scale", _SCALE, _SCALE_CONFIG.format(delay=0, notes=notes))
    # A batch begins when it is full, never because of the time.
    written(root, "full", _SCALE, _SCALE_CONFIG.format(delay=600_000_000, notes=notes))
    written(root, "greet", _GREET)
    written(root, "calls", _CALLS, _CALLS_CONFIG)
    written(root, "counts", _COUNTS, _COUNTS_CONFIG)
    written(root, "tells", _TELLS, _TELLS_CONFIG)
    (root / "told" / "1").mkdir(parents=True)
    (root / "told" / "config.pbtxt").write_text(_TOLD_CONFIG)
    written(root, "waits", _WAITS, _COUNTS_CONFIG + "max_batch_size: 4")
    with running(
        *("--model-repository", root, "--model-control", "explicit", "--load-model", "*"),
        transport=transport,
        logs_errors=True,
    ) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[InferenceClient]:
    with InferenceClient(server.address) as client:
        yield client


# The model, id, parameters and rows of a request.
Sent = tuple[str, str, dict[str, Any], list[list[float]]]


def x(*rows: Sequence[float]) -> Mapping[str, Any]:
    return {"x": np.array(rows, np.float32)}


def test_each_request_of_a_batch_is_a_request_of_the_model(client: InferenceClient) -> None:
    requests = [x([1, 2]), x([3, 4], [5, 6]), x([7, 8])]
    futures: list[Future[InferenceResult]] = [
        client.submit("full", each, timeout=PATIENCE) for each in requests
    ]
    for each, future in zip(requests, futures, strict=True):
        result = future.result(PATIENCE)
        assert result["y"].dtype == np.float64
        assert result["y"].tolist() == (3 * each["x"]).tolist()
        assert result["requests"].ravel().tolist() == [3] * len(each["x"])
    # Outputs that cannot be joined: each request runs again.
    futures = [client.submit("full", x([14 * (i == 1), 2]), timeout=PATIENCE) for i in range(4)]
    assert [future.result(PATIENCE)["y"].tolist() for future in futures] == [
        [[0, 6]],
        [[42]],
        [[0, 6]],
        [[0, 6]],
    ]


def test_responses_with_rows_of_other_requests_fail_alone(client: InferenceClient) -> None:
    """One has a row too few and one a row too many: their sum is right."""
    good = client.submit("full", x([1, 2]), timeout=PATIENCE)
    bad = [client.submit("full", each, timeout=PATIENCE) for each in (x([15, 1], [1, 1]), x([16, 2]))]
    assert good.result(PATIENCE)["y"].tolist() == [[3, 6]]
    for future in bad:
        with pytest.raises(Internal, match="rows"):
            future.result(PATIENCE)


def test_an_error_is_one_requests(client: InferenceClient) -> None:
    """Its text reaches the client, as it does Triton's. That of other exceptions stays in the log."""
    requests = {
        "x is negative": (x([-1, 1]), InvalidArgument),
        "x is too large": (x([100, 1]), NotFound),
        "model 'full' failed on this request: NaN is no number": (x([np.nan, 1]), Internal),
    }
    good = client.submit("full", x([2, 2]), timeout=PATIENCE)
    futures = {said: client.submit("full", each, timeout=PATIENCE) for said, (each, _) in requests.items()}
    assert good.result(PATIENCE)["y"].tolist() == [[6, 6]]
    for said, future in futures.items():
        with pytest.raises(requests[said][1], match=said):
            future.result(PATIENCE)
    with pytest.raises(Internal, match="execute returned 0 responses to 1 requests"):
        client.infer("scale", x([13]))
    with pytest.raises(InferenceError) as caught:
        client.infer("scale", x([17]))
    assert "secret" not in str(caught.value)


def test_requests_have_their_ids_and_parameters(client: InferenceClient) -> None:
    """Those of a batch, of an ensemble's steps, and the parts of one with more rows than a batch."""
    batch: list[Sent] = [
        ("tells", "a", {"top_k": 3, "mood": "é", "timeout": 10**12}, [[1]]),
        ("told", "b", {"share": 0.5, "greedy": True}, [[2], [2]]),
        ("tells", "", {}, [[4]]),
    ]
    parts: list[Sent] = [("tells", "c", {"top_k": 4}, [[5]] * 8)]
    for sent in (batch, parts):
        futures = [
            client.submit(name, x(*rows), request_id=request_id, parameters=parameters, timeout=PATIENCE)
            for name, request_id, parameters, rows in sent
        ]
        for (_, request_id, parameters, rows), future in zip(sent, futures, strict=True):
            parameters.pop("timeout", None)
            expected = [request_id, parameters, rows[0][0] * min(4, len(rows))]
            for said in future.result(PATIENCE)["said"].ravel():
                assert json.loads(said) == expected


def test_strings_and_a_configuration_that_the_class_completes(client: InferenceClient) -> None:
    answer = client.infer("greet", {"name": np.array([["Ada"], ["Zoë"]], object)})
    assert answer["text"].tolist() == [[b"hello Ada"], ["hello Zoë".encode()]]
    assert client.metadata("greet").inputs[0].shape == (-1, 1)


def test_calls_of_other_models(client: InferenceClient) -> None:
    assert client.infer("calls", x([4]))["y"].tolist() == [[12, 15, 12]]
    with pytest.raises(Internal, match="'missing' is not found"):
        client.infer("calls", x([50]))
    with pytest.raises(Internal, match="x is negative"):
        client.infer("calls", x([-5]))
    with pytest.raises(Internal, match="a model cannot send a request of a sequence"):
        client.infer("calls", x([60]))


def test_a_decoupled_model_sends_any_number_of_responses(client: InferenceClient) -> None:
    def numbers(count: int) -> list[int]:
        request = {"count": np.array([count], np.int32)}
        return [int(each["number"][0]) for each in client.stream("counts", [request], timeout=PATIENCE)]

    for count in (0, 1, 2, 3, 500):
        assert numbers(count) == [*range(count)]
    with pytest.raises(Internal, match="no more"):
        numbers(-4)
    assert numbers(2) == [0, 1]


def test_a_decoupled_model_sees_that_its_client_has_left(client: InferenceClient, models: Path) -> None:
    cancelled = models / "waits" / "1" / "cancelled"
    cancelled.touch()
    for notes in ("True\n", "True\nTrue\n"):
        responses = client.stream("waits", [{"count": np.array([[5], [6]], np.int32)}], timeout=PATIENCE)
        assert next(responses)["number"].tolist() == [[5], [6]]
        responses.close()
        until(cancelled.read_text, notes.__eq__)


def test_parameters_of_the_configuration_cause_no_warning(server: ServerProcess) -> None:
    """The models read them."""
    assert not [line for line in server.log if "parameters" in line]


def test_finalize_is_called_when_a_model_is_unloaded(client: InferenceClient, notes: Path) -> None:
    client.unload_model("full")
    until(lambda: notes.exists() and notes.read_text() == "full 1\n")
    client.load_model("full")
