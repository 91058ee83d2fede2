"""docs/protocol.md says of each error what code and words it has: each row is provoked over the wire."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from e2e import models
from e2e.server import ServerProcess
from grpc_health.v1 import health_pb2, health_pb2_grpc
from wire.rig import LONG, PATIENCE

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


class Row(NamedTuple):
    when: str
    triton: str
    here: str
    text: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().partition("## Errors")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch("[A-Z_]+", cells[1]):
            when, triton, _, here, text = cells
            found.append(Row(when, triton, here, text))
    return found


class Served(NamedTuple):
    """A server, to which the file of the key, 64 bytes, is the region `r`; and how to start another one.

    `control` is of a server with a repository, which clients load models of.
    """

    stub: Any
    control: Any
    repository: Path
    transport: str
    model: Path


# By model, its configuration; `loads` waits for its labels, which come by a pipe.
REPOSITORY = {
    "loads": 'output { name: "y" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }',
    "decoupled": "model_transaction_policy { decoupled: true }",
    "sequences": "sequence_batching { }",
    "broken": "max_batch_size: -1",
}


def repository_in(directory: Path) -> Path:
    for name, config in REPOSITORY.items():
        (directory / name / "1").mkdir(parents=True)
        models.echo(directory / name / "1" / "model.onnx")
        (directory / name / "config.pbtxt").write_text(config)
    os.mkfifo(directory / "loads" / "labels.txt")
    return directory


KEY = f"/tensorferry-page-{os.getpid()}"


@pytest.fixture(scope="module")
def served(
    transport: str, model_dir: Path, probe_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    texts = models.echo(model_dir / "texts.onnx", "BYTES")
    floats = models.echo(model_dir / "floats.onnx")
    file = Path("/dev/shm") / KEY.lstrip("/")
    file.write_bytes(bytes(64))
    repository = repository_in(tmp_path_factory.mktemp("repository"))
    server = ServerProcess.start("--allow-shared-memory", probe_model, texts, floats, transport=transport)
    control = ServerProcess.start(
        *("--model-repository", repository, "--model-control", "explicit", "--exit-on-error", "false"),
        *("--load-model", "decoupled", "--load-model", "sequences"),
        transport=transport,
    )
    try:
        with (
            grpc.insecure_channel(server.address) as channel,
            grpc.insecure_channel(control.address) as controlled,
        ):
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name="r", key=KEY, byte_size=64), timeout=PATIENCE
            )
            yield Served(
                stub,
                inference_pb2_grpc.GRPCInferenceServiceStub(controlled),
                repository,
                transport,
                probe_model,
            )
    finally:
        file.unlink()
        assert [server.stop(), control.stop()] == [0, 0]
    assert not server.errors(), "".join(server.log)


def good(rows: int = 1, work: int = 0) -> pb.ModelInferRequest:
    """To the probe model: work, x, index, in this order, raw."""
    request = pb.ModelInferRequest(model_name="probe")
    for name, datatype, array in (
        ("work", "INT64", np.full(rows, work, np.int64)),
        ("x", "FP32", np.zeros((rows, 4), np.float32)),
        ("index", "INT64", np.zeros(rows, np.int64)),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


Provoke = Callable[[Served], Any]
PROVOKED: dict[str, Provoke] = {}


def when(*cases: str) -> Callable[[Provoke], Provoke]:
    def add(provoke: Provoke) -> Provoke:
        for case in cases:
            assert case not in PROVOKED
            PROVOKED[case] = provoke
        return provoke

    return add


def infer(served: Served, request: pb.ModelInferRequest, **options: Any) -> Any:
    return served.stub.ModelInfer(request, timeout=PATIENCE, **options)


def spoiled(case: str) -> Callable[[Callable[[pb.ModelInferRequest], Any]], None]:
    """A good request, spoilt by the function, provokes it."""

    def add(spoil: Callable[[pb.ModelInferRequest], Any]) -> None:
        def provoke(served: Served) -> Any:
            request = good()
            spoil(request)
            return infer(served, request)

        when(case)(provoke)

    return add


def set_(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)


spoiled("the model is unknown")(lambda r: set_(r, model_name="nothing"))
spoiled("the version is unknown")(lambda r: set_(r, model_version="9"))
spoiled("the version is no number")(lambda r: set_(r, model_version="one"))
spoiled("an input is missing")(lambda r: (r.inputs.pop(), r.raw_input_contents.pop()))
spoiled("an input is unknown")(lambda r: set_(r.inputs[1], name="z"))
spoiled("an input comes twice")(lambda r: r.inputs.append(r.inputs[1]))
spoiled("an output is unknown")(lambda r: r.outputs.add(name="z"))
spoiled("an output is asked for twice")(lambda r: (r.outputs.add(name="y"), r.outputs.add(name="y")))
spoiled("the datatype is another")(lambda r: set_(r.inputs[1], datatype="FP64"))
spoiled("the shape does not fit")(lambda r: r.inputs[1].shape.__setitem__(slice(None), [2, 2]))
spoiled("the shape is empty")(lambda r: r.inputs[1].shape.__setitem__(slice(None), []))
spoiled("raw contents have another size")(lambda r: r.raw_input_contents.__setitem__(1, bytes(15)))
spoiled("an input has no contents")(lambda r: r.ClearField("raw_input_contents"))
spoiled("raw contents are too few")(lambda r: r.raw_input_contents.pop())
spoiled("raw contents are too many")(lambda r: r.raw_input_contents.append(b""))
spoiled("contents are raw and typed")(lambda r: r.inputs[1].contents.fp32_contents.extend([0] * 4))
spoiled("a parameter is reserved")(lambda r: set_(r.parameters["triton_mine"], bool_param=True))
spoiled("a parameter is of a wrong kind")(lambda r: set_(r.parameters["priority"], string_param="1"))
spoiled("a custom parameter is a uint64")(lambda r: set_(r.parameters["mine"], uint64_param=1))
spoiled("the time allowed is over")(lambda r: set_(r.parameters["timeout"], int64_param=1))
spoiled("the model fails")(lambda r: r.raw_input_contents.__setitem__(2, np.array([99]).tobytes()))
spoiled("no classes are asked for")(
    lambda r: set_(r.outputs.add(name="y").parameters["classification"], int64_param=0)
)


@spoiled("inputs differ in rows")
def _(request: pb.ModelInferRequest) -> None:
    request.inputs[1].shape[:] = [2, 4]
    request.raw_input_contents[1] = bytes(32)


@spoiled("typed contents are in a wrong field")
def _(request: pb.ModelInferRequest) -> None:
    request.ClearField("raw_input_contents")
    for given in request.inputs:
        given.contents.fp32_contents.extend([0] * (4 if given.name == "x" else 1))


@when("there are more rows than a batch holds")
def _(served: Served) -> Any:
    return infer(served, good(rows=100))


def texts(raw: bytes) -> pb.ModelInferRequest:
    """To the echo of strings, one of them."""
    request = pb.ModelInferRequest(model_name="texts", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
    return request


@when("a string's length is cut off")
def _(served: Served) -> Any:
    # Long enough for two empty strings.
    request = texts(b"\3\0\0\0abc\1\0")
    request.inputs[0].shape[:] = [1, 2]
    return infer(served, request)


@when("there are too many strings")
def _(served: Served) -> Any:
    return infer(served, texts(b"\1\0\0\0a\1\0\0\0b"))


@when("what is to be classified has no values to compare")
def _(served: Served) -> Any:
    request = texts(b"\1\0\0\0a")
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    return infer(served, request)


@when("there is too much to be classified")
def _(served: Served) -> Any:
    request = pb.ModelInferRequest(model_name="floats", raw_input_contents=[bytes(4 * 1_000_001)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1_000_001])
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    return infer(served, request)


@when("the queue is full")
def _(served: Served) -> Any:
    # More rows at once than ever wait.
    return _first_error(
        [served.stub.ModelInfer.future(good(1000, work=LONG), timeout=PATIENCE) for _ in range(9)]
    )


def _first_error(calls: list[Any]) -> Any:
    """What the first call to be refused got; the others are withdrawn."""
    refused = threading.Event()
    for call in calls:
        call.add_done_callback(lambda done: refused.set())
    assert refused.wait(PATIENCE)
    (first, *_) = [call for call in calls if call.done()]
    for call in calls:
        call.cancel()
    return first.result()


@when("the server stops")
def _(served: Served) -> Any:
    # One of its own, since it is stopped, with a request that keeps it.
    server = ServerProcess.start(served.model, transport=served.transport)
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE
            )
            running = stub.ModelInfer.future(good(work=LONG), timeout=PATIENCE)
            statuses = (change.status for change in watch)
            assert next(statuses) == health_pb2.HealthCheckResponse.SERVING
            server.signal()
            assert next(statuses) == health_pb2.HealthCheckResponse.NOT_SERVING
            try:
                return stub.ModelInfer(good(), timeout=PATIENCE)
            finally:
                running.cancel()
    finally:
        server.stop()


def placed(tensor: Any, region: str = "r", nbytes: int | None = 16, offset: int = 0) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_offset"].int64_param = offset
    if nbytes is not None:
        tensor.parameters["shared_memory_byte_size"].int64_param = nbytes


def input_placed(request: pb.ModelInferRequest, **where: Any) -> None:
    placed(request.inputs[1], **where)
    del request.raw_input_contents[1]


def output_placed(request: pb.ModelInferRequest, **where: Any) -> Any:
    output = request.outputs.add(name="y")
    placed(output, **where)
    return output


spoiled("the region is unknown")(lambda r: input_placed(r, region="other"))
spoiled("the offset is beyond the region")(lambda r: input_placed(r, offset=64))
spoiled("the tensor ends beyond the region")(lambda r: input_placed(r, offset=49))
spoiled("offset and size overflow")(lambda r: output_placed(r, nbytes=-32, offset=32))
spoiled("a tensor in shared memory has no size")(lambda r: input_placed(r, nbytes=None))
spoiled("a tensor in shared memory has another size")(lambda r: input_placed(r, nbytes=32))


@spoiled("a tensor in shared memory has contents")
def _(request: pb.ModelInferRequest) -> None:
    input_placed(request)
    request.inputs[1].contents.fp32_contents.extend([0] * 4)


spoiled("an output does not fit its place")(lambda r: output_placed(r, nbytes=15))
spoiled("classes are to go to shared memory")(
    lambda r: set_(output_placed(r).parameters["classification"], int64_param=1)
)


def registered(case: str, name: str, key: str, nbytes: int = 8) -> None:
    def provoke(served: Served) -> Any:
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=nbytes)
        return served.stub.SystemSharedMemoryRegister(request, timeout=PATIENCE)

    when(case)(provoke)


registered("a region is registered twice", "r", KEY)
registered("a region ends beyond its memory", "s", KEY, 65)
registered("a key names nothing", "s", "/tensorferry-nothing")
registered("a key is none", "s", "/")
registered("a key is reserved", "s", "/triton_python_backend_shm_region_1")


@when("the status of an unknown region")
def _(served: Served) -> Any:
    request = pb.SystemSharedMemoryStatusRequest(name="other")
    return served.stub.SystemSharedMemoryStatus(request, timeout=PATIENCE)


@when("CUDA shared memory where there is no GPU")
def _(served: Served) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Hides those that there are.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        server = ServerProcess.start(
            "--allow-shared-memory", "--device", "cpu", served.model, transport=served.transport
        )
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), byte_size=8)
            return stub.CudaSharedMemoryRegister(request, timeout=PATIENCE)
    finally:
        server.stop()


@when("shared memory is off")
def _(served: Served) -> Any:
    server = ServerProcess.start(served.model, transport=served.transport)
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = pb.SystemSharedMemoryRegisterRequest(name="r", key=KEY, byte_size=8)
            return stub.SystemSharedMemoryRegister(request, timeout=PATIENCE)
    finally:
        server.stop()


def to_model(name: str, version: str = "") -> pb.ModelInferRequest:
    """To one of the repository's."""
    request = pb.ModelInferRequest(model_name=name, model_version=version, raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request


def load(served: Served, name: str) -> Any:
    return served.control.RepositoryModelLoad(
        pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE
    )


def while_loading(case: str, version: str) -> None:
    @when(case)
    def _(served: Served) -> Any:
        name = "loads"
        loading = served.control.RepositoryModelLoad.future(
            pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE
        )
        try:
            # Opened once the server reads it; the labels end when it is closed.
            with (served.repository / "loads" / "labels.txt").open("w"):
                return served.control.ModelInfer(to_model("loads", version), timeout=PATIENCE)
        finally:
            loading.result()
            served.control.RepositoryModelUnload(
                pb.RepositoryModelUnloadRequest(model_name=name), timeout=PATIENCE
            )


while_loading("the model is loading", "1")
while_loading("the model is loading, and no version is named", "")


@when("the model is decoupled")
def _(served: Served) -> Any:
    return served.control.ModelInfer(to_model("decoupled"), timeout=PATIENCE)


@when("the model takes sequences")
def _(served: Served) -> Any:
    return served.control.ModelInfer(to_model("sequences"), timeout=PATIENCE)


when("a decoupled model is loaded")(lambda served: load(served, "decoupled"))
when("a model that takes sequences is loaded")(lambda served: load(served, "sequences"))
when("a model is loaded that cannot be")(lambda served: load(served, "broken"))
when("a model is loaded that is not there")(lambda served: load(served, "nothing"))


@when("a model is loaded where that is not allowed")
def _(served: Served) -> Any:
    return served.stub.RepositoryModelLoad(
        pb.RepositoryModelLoadRequest(model_name="probe"), timeout=PATIENCE
    )


@when("what is logged is changed")
def _(served: Served) -> Any:
    request = pb.LogSettingsRequest()
    request.settings["log_info"].bool_param = False
    return served.stub.LogSettings(request, timeout=PATIENCE)


def traced(case: str, level: str) -> None:
    @when(case)
    def _(served: Served) -> Any:
        request = pb.TraceSettingRequest()
        request.settings["trace_level"].value.append(level)
        return served.stub.TraceSetting(request, timeout=PATIENCE)


traced("traces have no file", "TIMESTAMPS")
traced("traces are to have tensors", "TENSORS")


def test_every_row_is_provoked_and_nothing_else() -> None:
    assert [row.when for row in rows()] == list(dict.fromkeys(row.when for row in rows()))
    assert {row.when for row in rows()} == PROVOKED.keys()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.when)
def test_a_row_of_the_page_is_what_a_client_gets(served: Served, row: Row) -> None:
    if row.here == "OK":
        assert PROVOKED[row.when](served)
        return
    with pytest.raises(grpc.RpcError) as caught:
        PROVOKED[row.when](served)
    error: Any = caught.value
    text = row.text.removeprefix("`").removesuffix("`")
    assert (error.code().name, text in error.details()) == (row.here, True), error.details()


def test_where_the_codes_differ_the_page_says_why() -> None:
    differing = {row.when for row in rows() if row.triton != row.here}
    assert differing == {
        "there are more rows than a batch holds",
        "raw contents are too many",
        "a custom parameter is a uint64",
        "the queue is full",
        "the time allowed is over",
        "an output does not fit its place",
        "a key names nothing",
        "CUDA shared memory where there is no GPU",
        "the model is loading, and no version is named",
        "the model is decoupled",
        "the model takes sequences",
        "a decoupled model is loaded",
        "a model that takes sequences is loaded",
        "a model is loaded that cannot be",
        "a model is loaded that is not there",
        "what is logged is changed",
        "traces are to have tensors",
    }
