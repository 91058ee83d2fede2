"""tritonclient's clients of HTTP: every method but inference, shared memory, and a repository that it controls."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from polling import PATIENCE
from support.models.small import written
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.http_inputs import Ask, probe, refusal, tensor, wanted
from tritonclient.utils import shared_memory as shm

UNKNOWN = ("404", "Request for unknown model: 'nobody' is not found")
LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "ISO8601",
}
NO_TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "opentelemetry",
}


def scaled(path: Path, factor: float) -> Path:
    text = "(float[batch, 3] x) => (float[batch, 3] y) { y = Mul (x, factor) }"
    return written(path, text, factor=np.float32(factor))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    (root / "scaled" / "1").mkdir(parents=True)
    scaled(root / "scaled" / "1" / "model.onnx", 2)
    return root


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path, probe_model: Path, repository: Path) -> Iterator[ServerProcess]:
    allowed = ("--allow-shared-memory", "--allow-log-settings", "--model-control", "explicit")
    options = ("--model-repository", repository, *allowed, "--http-port", "0")
    with running(probe_model, *models.echoes(model_dir, "INT32"), *options, transport=transport) as server:
        yield server


async def test_health_and_metadata(ask: Ask) -> None:
    assert await ask("is_server_live")
    assert await ask("is_server_ready")
    ready = [await ask("is_model_ready", *model) for model in (("probe",), ("probe", "1"), ("probe", "7"))]
    assert ready == [True, True, False]
    assert not await ask("is_model_ready", "nobody")
    described = await ask("get_server_metadata")
    assert described["name"] == "tensorferry"
    assert {"binary_tensor_data", "classification", "sequence", "system_shared_memory"} < set(
        described["extensions"]
    )
    for version in ("", "1"):
        metadata = await ask("get_model_metadata", "probe", version)
        assert (metadata["versions"], metadata["platform"]) == (["1"], "onnxruntime_onnx")
        assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    config = await ask("get_model_config", "probe")
    assert config["max_batch_size"] == 32
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
        ("x", "TYPE_FP32", [4]), ("index", "TYPE_INT64", []), ("work", "TYPE_INT64", [])
    ]  # fmt: skip
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        status, message = await refusal(ask(method, "nobody"))
        assert (status, message[: len(UNKNOWN[1])]) == UNKNOWN


async def test_statistics_are_numbers(ask: Ask) -> None:
    (before,) = (await ask("get_inference_statistics", "probe"))["model_stats"]
    await ask("infer", "probe", probe(1, rows=3))
    every = (await ask("get_inference_statistics"))["model_stats"]
    (after,) = (found for found in every if found["name"] == "probe")
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > 0
    assert after["batch_stats"][0]["compute_infer"]["count"] > 0


async def test_trace_settings_are_read_and_not_changed(ask: Ask) -> None:
    for model in (None, "probe"):
        assert await ask("get_trace_settings", model) == NO_TRACE
        assert await ask("update_trace_settings", model, {"trace_level": None}) == NO_TRACE
        found = await refusal(ask("update_trace_settings", model, {"trace_level": ["TIMESTAMPS"]}))
        assert found[0] == "501"


async def test_log_settings(ask: Ask) -> None:
    assert await ask("get_log_settings") == LOG
    changed = LOG | {"log_verbose_level": 1, "log_warning": False}
    assert await ask("update_log_settings", {"log_verbose_level": 1, "log_warning": False}) == changed
    assert await ask("update_log_settings", {"log_verbose_level": 0, "log_warning": True}) == LOG
    for wrong in ({"log_format": "yaml"}, {"log_info": None}, {"log_info": "yes"}):
        assert (await refusal(ask("update_log_settings", wrong)))[0] == "400"


async def test_shared_memory(ask: Ask) -> None:
    key, x = f"/tensorferry-test-{uuid.uuid4().hex}", np.arange(16, dtype=np.int32).reshape(1, 16)
    handle = shm.create_shared_memory_region("data", key, 128)
    try:
        await ask("register_system_shared_memory", "data", key, 128)
        region = {"name": "data", "key": key, "offset": 0, "byte_size": 128}
        assert await ask("get_system_shared_memory_status") == [region]
        assert await ask("get_system_shared_memory_status", "data") == [region]
        shm.set_shared_memory_region(handle, [x])
        placed, (output,) = tensor("x", x, "INT32"), wanted("y")
        placed.set_shared_memory("data", 64)
        output.set_shared_memory("data", 64, offset=64)
        (answer,) = (await ask("infer", "echo-INT32", [placed], outputs=[output])).get_response()["outputs"]
        assert (answer["shape"], "data" in answer) == ([1, 16], False)
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset=64), x)
        # Input from memory, and the answer in the body.
        found = await ask("infer", "echo-INT32", [placed])
        np.testing.assert_array_equal(found.as_numpy("y"), x)
        await ask("unregister_system_shared_memory", "data")
        await ask("unregister_system_shared_memory")
        assert await ask("get_system_shared_memory_status") == []
    finally:
        shm.destroy_shared_memory_region(handle)
    status, message = await refusal(ask("register_system_shared_memory", "data", key, 128))
    assert (status, "Unable to open shared memory region" in message) == ("404", True)
    assert (await refusal(ask("get_system_shared_memory_status", "data")))[0] == "404"


async def test_shared_memory_of_gpus(ask: Ask) -> None:
    assert await ask("get_cuda_shared_memory_status") == []
    wrong = base64.b64encode(b"too short")
    assert (await refusal(ask("register_cuda_shared_memory", "r", wrong, 0, 64)))[0] in ("400", "501")
    await ask("unregister_cuda_shared_memory")


async def test_a_repository_is_controlled(
    ask: Ask, server: ServerProcess, repository: Path, tmp_path: Path
) -> None:
    x = np.ones((2, 3), np.float32)

    def several() -> str:
        """Return the answer to a request for the only model, which says how many are ready."""
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{server.ready['http']}/invocations", b"{}", timeout=PATIENCE)
        with refused.value as answer:
            return str(json.load(answer)["error"])

    async def factor(version: str = "") -> float:
        answer = await ask("infer", "scaled", [tensor("x", x, "FP32")], model_version=version)
        return float(answer.as_numpy("y")[0, 0])

    async def versions() -> list[str]:
        index = [each for each in await ask("get_model_repository_index") if each["name"] == "scaled"]
        return [each["version"] for each in index if each["state"] == "READY"]

    assert "2 are ready" in several()
    await ask("load_model", "scaled")
    assert (await factor(), await versions()) == (2.0, ["1"])
    assert "3 are ready" in several()
    # As base64, over a configuration, which may be empty.
    sent = {"file:7/model.onnx": scaled(tmp_path / "sent.onnx", 7).read_bytes()}
    await ask("load_model", "scaled", config=json.dumps({"max_batch_size": 4}), files=sent)
    assert (await factor(), await versions()) == (7.0, ["7"])
    assert (await ask("get_model_config", "scaled"))["max_batch_size"] == 4
    assert (await refusal(factor("1")))[0] == "503"
    assert (await refusal(ask("load_model", "scaled", config="{")))[0] == "400"
    await ask("unload_model", "scaled", unload_dependents=True)
    assert (await ask("is_model_ready", "scaled"), await versions()) == (False, [])
    assert (await refusal(ask("load_model", "absent")))[0] in ("400", "404")
