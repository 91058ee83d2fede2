"""Tensors in system shared memory, with tritonclient and its utilities."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.inputs import given, probe, tensor, wanted
from support.wire.rig import Stream
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path, probe_model: Path) -> Iterator[ServerProcess]:
    echoes = models.echoes(model_dir, "INT32", "BYTES")
    with running("--allow-shared-memory", probe_model, *echoes, transport=transport) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client
        client.unregister_system_shared_memory()
        assert names(client) == []


class Memory:
    """Shared memory files of this test, by short names, which are also the names of the regions."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._prefix = f"/tensorferry-test-{uuid.uuid4().hex}-"
        self._handles: dict[str, Any] = {}

    def key(self, name: str) -> str:
        return self._prefix + name

    def create(self, name: str, nbytes: int = 64) -> None:
        self._handles[name] = shm.create_shared_memory_region(name, self.key(name), nbytes)

    def register(self, name: str, nbytes: int = 64, offset: int = 0) -> None:
        self._client.register_system_shared_memory(name, self.key(name), nbytes, offset=offset)

    def region(self, name: str, nbytes: int = 64) -> str:
        self.create(name, nbytes)
        self.register(name, nbytes)
        return name

    def put(self, name: str, array: Any, offset: int = 0) -> None:
        shm.set_shared_memory_region(self._handles[name], [array], offset=offset)

    def get(self, name: str, dtype: Any, shape: list[int], offset: int = 0) -> Any:
        return shm.get_contents_as_numpy(self._handles[name], dtype, shape, offset=offset).copy()

    def destroy(self, *chosen: str) -> None:
        for name in chosen or list(self._handles):
            shm.destroy_shared_memory_region(self._handles.pop(name))


@pytest.fixture
def memory(client: triton.InferenceServerClient) -> Iterator[Memory]:
    memory = Memory(client)
    yield memory
    memory.destroy()


def names(client: triton.InferenceServerClient) -> list[str]:
    return sorted(client.get_system_shared_memory_status().regions)


def refusal(client: triton.InferenceServerClient, placed: Any, output: Any = None) -> tuple[str, str]:
    """Return status and message of a refused request to the echo model."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer("echo-INT32", [placed], outputs=[output] if output else None)
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


SIXTEEN = np.arange(16, dtype=np.int32).reshape(1, 16)


def test_input_and_output_in_shared_memory(client: triton.InferenceServerClient, memory: Memory) -> None:
    memory.region("in")
    memory.region("out")
    # Repeated, because a cached template must not match another request.
    for times in range(1, 4):
        memory.put("in", SIXTEEN * times)
        result = client.infer("echo-INT32", [given("in", [1, 16], 64)], outputs=[wanted("out", 64)])
        response = result.get_response()
        assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("INT32", [1, 16])
        # One entry for each output, so that the outputs behind it are found by position.
        assert list(response.raw_output_contents) == [b""]
        np.testing.assert_array_equal(memory.get("out", np.int32, [1, 16]), SIXTEEN * times)


@pytest.mark.parametrize("in_memory", [{"x"}, {"work", "index"}])
def test_inputs_of_both_kinds(
    client: triton.InferenceServerClient, memory: Memory, in_memory: set[str]
) -> None:
    """Raw contents belong to the inputs that are not in shared memory, in their order."""
    values: dict[str, Any] = {
        "work": np.zeros(1, np.int64),
        "x": np.full((1, 4), 21, np.float32),
        "index": np.array([3], np.int64),
    }
    inputs = probe(21, 3)
    for placed in inputs:
        name = placed.name()
        if name in in_memory:
            memory.region(name)
            memory.put(name, values[name])
            placed.set_shared_memory(name, values[name].nbytes)
    np.testing.assert_array_equal(client.infer("probe", inputs).as_numpy("y"), np.full((1, 4), 45))


def test_strings(client: triton.InferenceServerClient, memory: Memory) -> None:
    texts = np.array([["", "plain", "zwölf"]], dtype=object)
    serialised = serialize_byte_tensor(texts)
    nbytes = len(serialised.item())
    memory.region("in", 256)
    memory.region("out", 256)
    memory.put("in", serialised)
    client.infer("echo-BYTES", [given("in", [1, 3], nbytes, kind="BYTES")], outputs=[wanted("out", 256)])
    assert memory.get("out", np.object_, [1, 3]).tolist() == [[text.encode() for text in texts[0]]]
    with pytest.raises(InferenceServerException, match="unexpected number of BYTES elements"):
        client.infer("echo-BYTES", [given("in", [1, 2], nbytes, kind="BYTES")])
    with pytest.raises(InferenceServerException, match="incomplete length prefix of BYTES element 3"):
        client.infer("echo-BYTES", [given("in", [1, 4], nbytes + 3, kind="BYTES")])


def test_in_a_stream(client: triton.InferenceServerClient, memory: Memory) -> None:
    memory.region("in")
    memory.region("out")
    memory.put("in", SIXTEEN)
    with Stream(client) as stream:
        stream.send("echo-INT32", [given("in", [1, 16], 64)], "1", outputs=[wanted("out", 64)])
        stream.send("echo-INT32", [given("nowhere", [1, 16], 64)], "2")
        assert stream.result().get_response().id == "1"
        np.testing.assert_array_equal(memory.get("out", np.int32, [1, 16]), SIXTEEN)
        assert "Unable to find shared memory region: 'nowhere'" in stream.error().message()


def test_register_status_unregister(client: triton.InferenceServerClient, memory: Memory) -> None:
    client.unregister_system_shared_memory("a")
    memory.create("a", PAGE + 64)
    memory.register("a", 64, offset=PAGE)
    status = client.get_system_shared_memory_status("a").regions["a"]
    assert (status.name, status.key, status.offset, status.byte_size) == ("a", memory.key("a"), PAGE, 64)
    assert names(client) == ["a"]
    client.unregister_system_shared_memory("a")
    assert names(client) == []


def test_a_region_outlives_its_file(client: triton.InferenceServerClient, memory: Memory) -> None:
    memory.region("in")
    memory.put("in", SIXTEEN)
    memory.destroy("in")
    result = client.infer("echo-INT32", [given("in", [1, 16], 64)])
    np.testing.assert_array_equal(result.as_numpy("y"), SIXTEEN)


def test_memory_that_shrinks_is_a_client_error(client: triton.InferenceServerClient, memory: Memory) -> None:
    memory.region("in", PAGE)
    memory.region("out", PAGE)
    for name in ("in", "out"):
        os.truncate(f"/dev/shm{memory.key(name)}", 0)
    for placed, output in (
        (given("in", [1, 16], 64), None),
        (tensor("x", SIXTEEN, "INT32"), wanted("out", 64)),
    ):
        code, message = refusal(client, placed, output)
        assert code == "INVALID_ARGUMENT"
        assert "has become smaller since it was registered" in message
    assert client.is_server_live()


@pytest.mark.parametrize("index", [0, 99], ids=["good", "fails in the model"])
def test_a_region_is_released_however_its_request_ends(
    client: triton.InferenceServerClient, memory: Memory, index: int
) -> None:
    memory.region("out")
    for inputs in (probe(1, index), probe(1)[:2], [*probe(1), *probe(1)]):
        try:
            client.infer("probe", inputs, outputs=[wanted("out", 16)], timeout=60_000_000)
        except InferenceServerException:
            pass
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        client.infer("probe", probe(1), outputs=[wanted("out", 16)], timeout=1)
    client.unregister_system_shared_memory("out")
    assert names(client) == []


def test_shared_memory_is_off_by_default(plain: ServerProcess) -> None:
    with triton.InferenceServerClient(plain.address) as client:
        assert not client.get_system_shared_memory_status().regions
        calls: tuple[Any, ...] = (
            lambda: client.register_system_shared_memory("a", "/a", 8),
            lambda: client.unregister_system_shared_memory("a"),
            client.unregister_cuda_shared_memory,
        )
        for call in calls:
            with pytest.raises(InferenceServerException) as caught:
                call()
            assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
            assert "Client shared memory is disabled" in caught.value.message()
            assert "--allow-shared-memory" in caught.value.message()
        with pytest.raises(InferenceServerException, match="--allow-shared-memory") as caught:
            client.infer("probe", probe(1), outputs=[wanted("a", 16)])
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        assert "system_shared_memory" not in client.get_server_metadata().extensions
