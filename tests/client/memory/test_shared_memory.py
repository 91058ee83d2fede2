"""Shared memory that one call of the client sets up."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from client.scripted import ScriptedServer, model
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient, InferenceError, InvalidInput, Unimplemented
from tensorferry.client.connection import system_memory
from tensorferry.client.connection.system_memory import DIRECTORY, SystemMemory
from tensorferry.protos import inference_pb2 as pb

MINE = f"{os.getpid():08x}"
IMAGES = np.random.default_rng(1).integers(0, 17, (32, 8, 8), np.uint8)


@pytest.fixture
def local(digits: ServerProcess) -> Iterator[InferenceClient]:
    with InferenceClient(digits.address) as client:
        yield client


@pytest.fixture(autouse=True)
def _names_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run in other processes at the same time have files, too."""

    def named() -> SimpleNamespace:
        return SimpleNamespace(hex=MINE + uuid.uuid4().hex[len(MINE) :])

    monkeypatch.setattr(system_memory, "uuid", SimpleNamespace(uuid4=named))


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test there is no file, and the server has no region."""
    yield
    assert files() == []
    if "digits" in request.fixturenames:
        with InferenceClient(request.getfixturevalue("digits").address) as client:
            stub = client._endpoints.pick().stub
            assert not stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions


def files() -> list[str]:
    # Other tests have files with other names.
    digits = (32 - len(MINE)) * "[0-9a-f]"
    return sorted(path.name for path in DIRECTORY.glob(f"tensorferry-{MINE}{digits}"))


def test_results_are_those_of_arrays(local: InferenceClient) -> None:
    expected = local.infer("digits", {"image": IMAGES})
    with local.shared_memory("digits", 32) as memory:
        assert len(files()) == 1
        assert memory.inputs["image"].shape == (32, 8, 8)
        memory.inputs["image"][...] = IMAGES
        result = memory.infer(request_id="a", timeout=30, parameters={"explain": True})
        assert set(result) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(result[name], array)
            assert result[name].dtype == array.dtype
        assert (result.id, result.model_name, result.parameters["batch_rows"]) == ("a", "digits", 32)
        memory.inputs["image"][:3] = IMAGES[10:13]
        part = memory.infer(rows=3)
        np.testing.assert_array_equal(part["label"], expected["label"][10:13])
        np.testing.assert_array_equal(part["probabilities"], expected["probabilities"][10:13])
        np.testing.assert_array_equal(result["label"][:3], part["label"])
    np.testing.assert_array_equal(part["label"], expected["label"][10:13])


def test_a_failed_call_leaves_nothing(local: InferenceClient) -> None:
    with pytest.raises(RuntimeError, match="mine"), local.shared_memory("digits", 2) as memory:
        raise RuntimeError("mine")
    with (
        pytest.raises(InvalidInput, match="rows expects an int from 1 to 2, got 3"),
        local.shared_memory("digits", 2) as memory,
    ):
        memory.infer(rows=3)
    with pytest.raises(InferenceError), local.shared_memory("digits", 2) as memory:
        memory.infer(timeout=1e-6)


def test_a_closed_client_leaves_no_file(digits: ServerProcess) -> None:
    with InferenceClient(digits.address) as other, InferenceClient(digits.address) as client:
        with client.shared_memory("digits", 2):
            [name] = files()
            client.close()
        stub = other._endpoints.pick().stub
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))


def test_a_statement_within_its_own_is_refused(local: InferenceClient) -> None:
    """The memory of the outer one would stay."""
    with (
        local.shared_memory("digits", 2) as memory,
        pytest.raises(RuntimeError, match="exists already"),
        memory,
    ):
        raise AssertionError("created")


def test_a_refused_region_leaves_nothing(client: InferenceClient) -> None:
    """The scripted server has no shared memory."""
    with pytest.raises(Unimplemented), client.shared_memory("digits", 2):
        raise AssertionError("registered")


def test_the_arrays_exist_only_inside_the_with_statement(local: InferenceClient) -> None:
    memory: Any = local.shared_memory("digits", 2)
    with pytest.raises(RuntimeError, match="exists only inside its `with` statement"):
        memory.infer()
    with local.shared_memory("digits", 2) as memory:
        pass
    with pytest.raises(RuntimeError, match="exists only inside its `with` statement"):
        _ = memory.inputs


SIZELESS: list[tuple[str, Any, Any, str]] = [
    ("digits", 0, None, "rows expects an int from 1"),
    ("digits", "2", None, "rows expects an int from 1"),
    ("text", 2, None, "tensor 'words' of model 'text' in shared memory expects a datatype of a fixed size, got BYTES"),
    ("strange", 2, None, "expects a datatype of a fixed size, got FP8: datatype 'FP8' is not one of BOOL"),
    ("free", 2, None, r"expects a fixed shape, got \[2, -1, 3\]: give its whole shape, as in shapes={'x': \(2, 128, 3\)}"),
    ("free", 2, {"x": (2, 5)}, r"expects a shape like \[2, -1, 3\], got \[2, 5\]"),
    ("free", 2, {"x": (2, 5, 4)}, r"expects a shape like \[2, -1, 3\], got \[2, 5, 4\]"),
    ("free", 2, {"x": (2, 0, 3)}, "each axis of 'x' in shapes expects an int from 1"),
    ("free", 2, {"z": (2,)}, "shapes expects inputs and outputs of model 'free': 'x', got 'z': remove 'z'"),
    ("free", 2, [1], "shapes expects a dict"),
    ("nameless", 1, None, "expects a model whose metadata names its inputs and outputs"),
]  # fmt: skip


def test_what_has_no_size_is_refused(server: ScriptedServer, client: InferenceClient) -> None:
    server.servicer.models["free"] = model("free", {"x": "FP32 -1 -1 3"}, {"x": "FP32 -1 -1 3"})
    server.servicer.models["strange"] = model("strange", {"x": "FP8 -1"}, {"x": "FP8 -1"})
    server.servicer.models["nameless"] = model("nameless", {}, {})
    for name, rows, shapes, message in SIZELESS:
        with pytest.raises(InvalidInput, match=message), client.shared_memory(name, rows, shapes=shapes):
            raise AssertionError("created")


def test_wrong_timeouts_are_refused(local: InferenceClient) -> None:
    refused = pytest.raises(InvalidInput, match="timeout expects a positive number of seconds")
    with refused, local.shared_memory("digits", 2, timeout=0):
        raise AssertionError("created")
    with local.shared_memory("digits", 2) as memory, refused:
        memory.infer(timeout=0)


def test_several_targets_are_refused() -> None:
    client = InferenceClient(["127.0.0.1:1", "127.0.0.1:2"])
    with pytest.raises(InvalidInput, match="shared memory expects a client of one target, got 2 targets"):
        client.shared_memory("digits", 2)
    client.close()


def test_without_memory_nothing_is_left() -> None:
    free = os.statvfs(DIRECTORY)
    with pytest.raises(OSError, match="No space left"):
        SystemMemory(free.f_frsize * free.f_blocks + (1 << 30))
