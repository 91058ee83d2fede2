"""Ensembles like those of Triton's examples load unchanged, and answer tritonclient and the bundled client.

The repository has the form of Triton's image ensemble: a model that preprocesses, a classifier with a label file, and an
ensemble of both. A second ensemble returns the label as a string, by a third model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from polling import PATIENCE, until
from support.models.small import node, save, value
from support.processes.server import ServerProcess, running
from support.server.rig import Array
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException

from tensorferry.client import InferenceClient
from tensorferry.protos.standard import health_pb2

CLIENTS, RELOADS = 3, 2

PREPROCESS = """
name: "image_preprocess"
platform: "onnxruntime_onnx"
max_batch_size: 32
input [ { name: "INPUT" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } ]
dynamic_batching { }
"""

CLASSIFIER = """
name: "colours_onnx"
backend: "onnxruntime"
max_batch_size: 32
input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, -1, -1 ] } ]
output [ { name: "prob_1" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "colour_labels.txt" } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""

STEPS = """
    {
      model_name: "image_preprocess"
      model_version: -1
      input_map { key: "INPUT" value: "IMAGE" }
      output_map { key: "OUTPUT" value: "preprocessed_image" }
    },
    {
      model_name: "colours_onnx"
      model_version: -1
      input_map { key: "data_0" value: "preprocessed_image" }
      output_map { key: "prob_1" value: "CLASSIFICATION" }
    }
"""

ENSEMBLE = """
name: "preprocess_colours_ensemble"
platform: "ensemble"
max_batch_size: 8
input [
  {
    name: "IMAGE"
    data_type: TYPE_UINT8
    dims: [ -1, -1, 3 ]
  }
]
output [
  {
    name: "CLASSIFICATION"
    data_type: TYPE_FP32
    dims: [ 3 ]
  }
]
ensemble_scheduling {
  step [ STEPS ]
}
""".replace("STEPS", STEPS)

NAMED_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] } ]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "CLASSIFICATION" data_type: TYPE_FP32 dims: [ 3 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "colour_name"
      model_version: 1
      input_map { key: "scores" value: "CLASSIFICATION" }
      output_map { key: "name" value: "LABEL" }
    },
    STEPS
  ]
}
""".replace("STEPS", STEPS)

COLOUR_NAME = """
import numpy as np

from tensorferry.serving import FP32, STRING, model


@model(inputs={"scores": FP32[-1, 3]}, outputs={"name": STRING[-1, 1]})
def colour_name(scores):
    return np.array(["red", "green", "blue"], object)[scores.argmax(axis=1)][:, None]
"""

SIMPLE, NAMED = "preprocess_colours_ensemble", "colours_by_name"


def preprocess(path: Path) -> Path:
    """Bytes of an image, rows of pixels of three colours, become numbers from 0 to 1, by colour."""
    return save(
        path,
        [
            node("Cast", "INPUT", "number", to=1),
            node("Div", "number most", "part"),
            node("Transpose", "part", "OUTPUT", perm=[0, 3, 1, 2]),
        ],
        [value("INPUT", "UINT8", ("batch", "height", "width", 3))],
        [value("OUTPUT", "FP32", ("batch", 3, "height", "width"))],
        {"most": np.float32(255)},
    )


def classifier(path: Path) -> Path:
    """The mean of each colour."""
    return save(
        path,
        [node("ReduceMean", "data_0", "prob_1", axes=[2, 3], keepdims=0)],
        [value("data_0", "FP32", ("batch", 3, "height", "width"))],
        [value("prob_1", "FP32", ("batch", 3))],
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository."""
    root = tmp_path_factory.mktemp("ensembles")
    for name, config in (
        ("image_preprocess", PREPROCESS),
        ("colours_onnx", CLASSIFIER),
        (SIMPLE, ENSEMBLE),
        (NAMED, NAMED_ENSEMBLE),
        ("colour_name", ""),
    ):
        (root / name / "1").mkdir(parents=True)
        if config:
            (root / name / "config.pbtxt").write_text(config)
    preprocess(root / "image_preprocess" / "1" / "model.onnx")
    classifier(root / "colours_onnx" / "1" / "model.onnx")
    (root / "colours_onnx" / "colour_labels.txt").write_text("RED\nGREEN\nBLUE\n")
    (root / "colour_name" / "1" / "model.py").write_text(COLOUR_NAME)
    return root


def images(*colours: int, height: int = 4, width: int = 5) -> Array:
    """One image for each colour, which is 200 there; the other colours are 100."""
    made = np.full((len(colours), height, width, 3), 100, np.uint8)
    for image, colour in zip(made, colours, strict=True):
        image[..., colour] = 200
    return made


def scores(*colours: int) -> Array:
    expected = np.full((len(colours), 3), 100 / 255, np.float32)
    expected[np.arange(len(colours)), colours] = 200 / 255
    return expected


@pytest.fixture(scope="module")
def explicit(transport: str, root: Path) -> Iterator[ServerProcess]:
    """A server in which clients load models."""
    options = ("--model-control", "explicit", "--load-model", "*", "--processes", "1")
    with running("--model-repository", root, *options, transport=transport) as server:
        yield server


@pytest.fixture
def client(explicit: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(explicit.address) as client:
        yield client


def test_what_clients_see_of_an_ensemble(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata(SIMPLE)
    assert metadata.platform == "ensemble"
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("IMAGE", "UINT8", [-1, -1, -1, 3])
    ]
    config = client.get_model_config(SIMPLE).config
    assert config.max_batch_size == 8
    assert [step.model_name for step in config.ensemble_scheduling.step] == [
        "image_preprocess",
        "colours_onnx",
    ]

    def counts() -> dict[str, tuple[int, int]]:
        found = client.get_inference_statistics().model_stats
        return {each.name: (each.inference_count, each.inference_stats.success.count) for each in found}

    assert set(counts().values()) == {(0, 0)}
    client.infer(SIMPLE, [tensor("IMAGE", images(0, 1), "UINT8")])
    expected = {
        SIMPLE: (2, 1),
        NAMED: (0, 0),
        "image_preprocess": (2, 1),
        "colours_onnx": (2, 1),
        "colour_name": (0, 0),
    }
    until(counts, lambda found: found == expected)


def test_an_image_ensemble_answers_both_clients(
    explicit: ServerProcess, client: triton.InferenceServerClient
) -> None:
    given, expected = images(2, 0, 1), scores(2, 0, 1)
    result = client.infer(SIMPLE, [tensor("IMAGE", given, "UINT8")])
    np.testing.assert_allclose(result.as_numpy("CLASSIFICATION"), expected, rtol=1e-6)
    # As Triton's image_client asks: the best class of each image, with its label.
    best = triton.InferRequestedOutput("CLASSIFICATION", class_count=1)
    labels = client.infer(SIMPLE, [tensor("IMAGE", given, "UINT8")], outputs=[best]).as_numpy(
        "CLASSIFICATION"
    )
    assert [label.decode().split(":")[1:] for label in labels.ravel()] == [
        ["2", "BLUE"],
        ["0", "RED"],
        ["1", "GREEN"],
    ]
    named = client.infer(NAMED, [tensor("IMAGE", given, "UINT8")])
    assert named.as_numpy("LABEL").tolist() == [[b"blue"], [b"red"], [b"green"]]
    np.testing.assert_allclose(named.as_numpy("CLASSIFICATION"), expected, rtol=1e-6)
    with InferenceClient(explicit.address) as own:
        np.testing.assert_allclose(own.infer(SIMPLE, {"IMAGE": given})["CLASSIFICATION"], expected, rtol=1e-6)
        assert own.infer(NAMED, {"IMAGE": given})["LABEL"].tolist() == [[b"blue"], [b"red"], [b"green"]]
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'IMAGE'"):
        client.infer(SIMPLE, [tensor("IMAGE", np.ascontiguousarray(given[..., :2]), "UINT8")])


def test_an_ensemble_is_ready_while_its_models_are(
    explicit: ServerProcess, client: triton.InferenceServerClient
) -> None:
    with grpc.insecure_channel(explicit.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        def states() -> tuple[bool, bool, bool]:
            """Return the readiness of both ensembles, and the health of the first."""
            health = check(health_pb2.HealthCheckRequest(service=SIMPLE), timeout=PATIENCE).status
            return client.is_model_ready(SIMPLE), client.is_model_ready(NAMED), health == 1

        assert states() == (True, True, True)
        client.unload_model("colour_name")
        assert states() == (True, False, True)
        client.unload_model("colours_onnx")
        until(states, lambda found: found == (False, False, False))
        index = {entry.name: entry for entry in client.get_model_repository_index().models}
        assert index[SIMPLE].state == "UNAVAILABLE"
        assert index[SIMPLE].reason.startswith("its steps need model 'colours_onnx', which is UN")
        with pytest.raises(InferenceServerException, match="is not at ready state") as refused:
            client.infer(SIMPLE, [tensor("IMAGE", images(0), "UINT8")])
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        client.load_model("colours_onnx")
        client.load_model("colour_name")
        until(states, lambda found: found == (True, True, True))
        client.unload_model(SIMPLE, unload_dependents=True)
        until(states, lambda found: found == (False, True, False))
        client.load_model(SIMPLE)


def test_a_rolling_reload_under_load_loses_nothing(
    explicit: ServerProcess, client: triton.InferenceServerClient, root: Path
) -> None:
    ended, answered = threading.Event(), threading.Semaphore(0)
    wrong: list[object] = []

    def call(own: InferenceClient, colour: int) -> None:
        given = images(colour)
        while not ended.is_set():
            try:
                answer = own.infer(NAMED, {"IMAGE": given}, timeout=PATIENCE)["LABEL"].tolist()
                if answer != [[(b"red", b"green", b"blue")[colour]]]:
                    wrong.append(answer)
            except Exception as error:
                wrong.append(error)
            answered.release()

    with InferenceClient(explicit.address) as own:
        threads = [threading.Thread(target=call, args=(own, colour)) for colour in range(CLIENTS)]
        for thread in threads:
            thread.start()
        changes: dict[str, Callable[[Path], object]] = {
            "image_preprocess/1/model.onnx": preprocess,
            "colours_onnx/1/model.onnx": classifier,
            "colour_name/1/model.py": lambda path: path.write_text(COLOUR_NAME),
            f"{NAMED}/config.pbtxt": lambda path: path.write_text(NAMED_ENSEMBLE),
        }
        for _ in range(RELOADS):
            for file, write in changes.items():
                new = root / f"{file}.new"
                write(new)
                new.rename(root / file)
                client.load_model(file.partition("/")[0])
                assert answered.acquire(timeout=PATIENCE)
        ended.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert wrong == []


def test_polling_follows_the_models_of_an_ensemble(root: Path, tmp_path: Path, serve: Serve) -> None:
    server = serve("--model-repository", root, "--model-control", "poll", "--repository-poll-seconds", "0.02")
    with triton.InferenceServerClient(server.address) as client:
        away = tmp_path / "away"
        (root / "colours_onnx").rename(away)
        until(lambda: not client.is_model_ready(SIMPLE))
        away.rename(root / "colours_onnx")
        until(lambda: client.is_model_ready(SIMPLE))
        result = client.infer(SIMPLE, [tensor("IMAGE", images(1), "UINT8")])
        np.testing.assert_allclose(result.as_numpy("CLASSIFICATION"), scores(1), rtol=1e-6)
