"""Models whose signature says less than they do, or something else, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models.classifiers import trees
from support.models.scaled import scaled, with_defaults
from support.models.shapeless import doubled
from support.models.small import node, save, value
from support.processes.server import ServerProcess, running
from support.server.rig import Array
from support.wire.inputs import tensor
from support.wire.rig import Stream, until_known
from tritonclient.utils import InferenceServerException

from tensorferry.client import InferenceClient, InvalidInput


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path) -> Iterator[ServerProcess]:
    served: list[str | Path] = [
        trees(model_dir / "trees.onnx"),
        doubled(model_dir / "doubled.onnx"),
        scaled(model_dir / "scaled.onnx"),
        with_defaults(model_dir / "defaults.onnx"),
        save(
            model_dir / "sum.onnx",
            [node("Add", "a b", "y")],
            [value("a", dims=["n", "length"]), value("b", dims=["n", "length"])],
            [value("y", dims=["n", None])],
        ),
    ]
    # A batch closes only when it is full, so answered requests have shared a batch.
    options = ("--max-batch-size", "4", "--max-queue-delay-ms", "600000")
    with running(*served, *options, transport=transport) as server:
        yield server


def together(
    client: triton.InferenceServerClient, model: str, requests: Sequence[list[triton.InferInput]]
) -> list[triton.InferResult]:
    """Return the answers to requests that are in progress at the same time."""
    with Stream(client) as stream:
        for number, inputs in enumerate(requests):
            client.async_stream_infer(model, inputs, request_id=str(number))
        results = [stream.result() for _ in requests]
    return sorted(results, key=lambda result: int(result.get_response().id))


def test_a_label_whose_first_dimension_is_fixed(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("trees")
    assert [(output.name, list(output.shape)) for output in metadata.outputs] == [
        ("label", [-1]),
        ("probabilities", [-1, 3]),
    ]
    inputs = [np.array(rows, np.float32) for rows in ([[1, 0]], [[-1, 0], [1, 0]], [[-1, 0]])]
    answers = together(client, "trees", [[tensor("x", x, "FP32")] for x in inputs])
    assert [answer.as_numpy("label").tolist() for answer in answers] == [[2], [1, 2], [1]]
    (one,) = client.get_inference_statistics("trees").model_stats
    assert (one.inference_count, one.execution_count) == (4, 1)


def test_axes_of_one_name_that_differ_in_length(client: triton.InferenceServerClient) -> None:
    def added(a: int, b: int) -> triton.InferResult:
        lengths = {"a": a, "b": b}
        inputs = [tensor(name, np.ones((4, length), np.float32), "FP32") for name, length in lengths.items()]
        return client.infer("sum", inputs)

    assert added(2, 2).as_numpy("y").tolist() == [[2, 2]] * 4
    with pytest.raises(InferenceServerException) as caught:
        added(2, 3)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert (
        "axis 'length' has the lengths 2 (axis 1 of input 'a'), 3 (axis 1 of input 'b'): "
        "send one length for all axes of a name"
    ) in caught.value.message()
    # The model answers, so the name was only a hint.
    assert added(2, 1).as_numpy("y").tolist() == [[2, 2]] * 4


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3)])
def test_a_tensor_of_any_rank(client: triton.InferenceServerClient, shape: tuple[int, ...]) -> None:
    metadata = client.get_model_metadata("doubled")
    assert [list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [[-1], [-1]]
    x = np.full(shape, 21, np.float32)
    found = client.infer("doubled", [tensor("x", x, "FP32")]).as_numpy("y")
    np.testing.assert_array_equal(found, 2 * x)


def test_a_tensor_of_any_rank_has_lengths_of_its_own(client: triton.InferenceServerClient) -> None:
    until_known(client, "doubled", tensor("x", np.zeros(0, np.float32), "FP32"))
    assert client.infer("doubled", [tensor("x", np.zeros(0, np.float32), "FP32")]).as_numpy("y").shape == (0,)
    with pytest.raises(InferenceServerException, match=r"axis 1 of input 'x'.*has length zero"):
        client.infer("doubled", [tensor("x", np.zeros((2, 0), np.float32), "FP32")])


def test_a_scalar_beside_rows(client: triton.InferenceServerClient) -> None:
    """Requests with equal scalars share a batch, others do not, and templates do not mix them up."""
    metadata = client.get_model_metadata("scaled")
    assert [list(one.shape) for one in metadata.inputs] == [[-1, 3], []]
    config = client.get_model_config("scaled").config
    assert [one.is_shape_tensor for one in config.input] == [False, True]
    for _ in range(3):
        scales = [2.0, 3.0] * 4
        inputs = [
            [
                tensor("x", np.full((1, 3), number, np.float32), "FP32"),
                tensor("scale", np.array(scale, np.float32), "FP32"),
            ]
            for number, scale in enumerate(scales)
        ]
        answers = together(client, "scaled", inputs)
        found = [answer.as_numpy("y").tolist() for answer in answers]
        assert found == [[[number * scale] * 3] for number, scale in enumerate(scales)]
    (one,) = client.get_inference_statistics("scaled").model_stats
    assert (one.inference_count, one.execution_count) == (24, 6)


def test_inputs_with_a_default(client: triton.InferenceServerClient) -> None:
    """Inputs with a default may be omitted; requests with equal values share a batch."""
    metadata = client.get_model_metadata("defaults")
    assert [one.name for one in metadata.inputs] == ["x", "scale", "bias"]
    config = client.get_model_config("defaults").config
    assert [one.optional for one in config.input] == [False, True, True]
    given: list[dict[str, Array]] = [
        {},
        {"scale": np.array(3, np.float32)},
        {"bias": np.ones(3, np.float32)},
        {"scale": np.array(3, np.float32), "bias": np.ones(3, np.float32)},
    ]
    for _ in range(3):
        sent = [
            [
                tensor("x", np.full((1, 3), number, np.float32), "FP32"),
                *(tensor(name, array, "FP32") for name, array in given[number % 4].items()),
            ]
            for number in range(16)
        ]
        for number, answer in enumerate(together(client, "defaults", sent)):
            scale, bias = given[number % 4].get("scale", 2), given[number % 4].get("bias", 0)
            np.testing.assert_array_equal(answer.as_numpy("y"), np.full((1, 3), number) * scale + bias)
    (one,) = client.get_inference_statistics("defaults").model_stats
    assert (one.inference_count, one.execution_count) == (48, 12)


def test_the_bundled_client_omits_them(server: ServerProcess) -> None:
    x = np.ones((4, 3), np.float32)
    with InferenceClient(server.address) as client:
        np.testing.assert_array_equal(client.infer("defaults", {"x": x})["y"], 2 * x)
        np.testing.assert_array_equal(client.infer("defaults", {"x": x, "scale": 5.0})["y"], 5 * x)
        metadata = client.metadata("defaults")
        assert [one.optional for one in metadata.inputs] == [False, True, True]
        assert metadata.properties["optional_inputs"] == "scale,bias"
        with pytest.raises(InvalidInput, match="add 'x'"):
            client.infer("defaults", {"scale": 5.0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": np.ones(1, np.float32)}, "unexpected shape for input 'scale'"),
        ({"bias": np.ones(3, np.float64)}, "inference input 'bias' data-type is 'FP64'"),
        ({"other": np.ones(3, np.float32)}, "unexpected inference input 'other'"),
    ],
)
def test_an_optional_input_is_checked(
    client: triton.InferenceServerClient, given: dict[str, Array], message: str
) -> None:
    kinds = {"float32": "FP32", "float64": "FP64"}
    inputs = [tensor("x", np.ones((4, 3), np.float32), "FP32")]
    inputs += [tensor(name, array, kinds[str(array.dtype)]) for name, array in given.items()]
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer("defaults", inputs)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
