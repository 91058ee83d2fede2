"""Two models of one server have the options of their tables, and another model those of the whole server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from support.models import small

from tensorferry.client import InferenceClient

LONG_MS = 600_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with tables of models. Two have windows of ten minutes, so only full batches run."""
    masked = small.masked_mean(tmp_path / "model.onnx")
    path = tmp_path / "c.toml"
    path.write_text(f"""
        device = "cpu"
        max-batch-size = 16
        slo-ms = 30000

        [models.twice]
        path = "{small.twice(tmp_path / "other.onnx")}"
        max-batch-size = 3
        max-queue-delay-ms = {LONG_MS}
        instances = 2
        threads = 1
        run-timeout-seconds = 300

        [models.masked]
        path = "{masked}"
        max_batch_size = 2
        max_queue_delay_ms = {LONG_MS}
        pad_lengths = "sequence=4,8"
        pad_values = ["ids=0", "mask=0"]
        slo_ms = 60000

        [models.plain]
        path = "{small.echo(tmp_path / "plain.onnx")}"
    """)
    return path


def test_each_model_has_the_options_of_its_table(serve: Serve, file: Path) -> None:
    server = serve("--config", file, "--metrics-port", 0)
    batching = {model["name"]: model["batching"] for model in server.ready["models"]}
    assert batching["twice"].startswith(f"batches of up to 3 rows after at most {LONG_MS} ms")
    assert batching["masked"].endswith(", padded along 'sequence' to 4, 8")
    assert batching["plain"].startswith("batches of up to 16 rows (")
    with InferenceClient(server.address) as client:
        row = np.array([[1, 2, 3]], np.float32)
        futures = [client.submit("twice", {"x": row * n}, parameters={"explain": True}) for n in range(3)]
        results = [future.result(60) for future in futures]
        assert [result["y"].tolist() for result in results] == [(row * 2 * n).tolist() for n in range(3)]
        assert {result.parameters["batch_rows"] for result in results} == {3}

        texts = [{name: np.ones((1, length), np.int64) for name in ("ids", "mask")} for length in (5, 7)]
        futures = [client.submit("masked", text, parameters={"explain": True}) for text in texts]
        parameters = [future.result(60).parameters for future in futures]
        assert [(one["batch_rows"], one["padded_length"]) for one in parameters] == [(2, 7), (2, 7)]

        x = np.ones((1, 5), np.float32)
        assert client.infer("plain", {"x": x})["x_out"].tolist() == x.tolist()

    settings = {name: model["settings"] for name, model in server.statuses().items()}
    names = ("max_batch_size", "devices", "slo_seconds", "run_timeout_seconds", "padded_lengths")
    assert {model: [of_model[name] for name in names] for model, of_model in settings.items()} == {
        "twice": [3, ["cpu", "cpu"], 30, 300, []],
        "masked": [2, ["cpu"], 60, 600, [4, 8]],
        "plain": [16, ["cpu"], 30, 600, []],
    }
