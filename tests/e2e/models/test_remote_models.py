"""Models from S3, a web server and a hub, served by real servers; each place where a model can be named."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from polling import PATIENCE, until
from support.models import external, sentence_encoder, small
from support.processes.server import ServerProcess, command, environment, run_command, running
from support.remote.hub import FakeHub
from support.remote.s3_server import S3Server, s3_server
from support.remote.web_server import Request, Response, WebServer, web_server

from tensorferry.client import InferenceClient

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    with web_server(tmp_path) as server:
        yield server


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with web_server(None) as server:
        yield FakeHub(server)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_each_place_that_names_a_model_takes_an_address(tmp_path: Path, web: WebServer, hub: FakeHub) -> None:
    body, data = external.scaled(tmp_path / "big.onnx", 3.0)
    web.files |= {"/big.onnx": body, "/big.onnx_data": data}
    web.files["/twice.onnx"] = small.twice(tmp_path / "twice.onnx").read_bytes()
    hub.commit("org/repo", {"onnx/model.onnx": web.files["/twice.onnx"]})
    app = tmp_path / "app.py"
    app.write_text(
        'from tensorferry.serving import onnx\nfrom_hub = onnx("hf://org/repo/onnx/model.onnx", name="hub")\n'
    )
    file = tmp_path / "c.toml"
    file.write_text(f'[models.table]\npath = "{web.url}/twice.onnx"\nmax-batch-size = 2\n')
    variables = variables_of(web, hub, tmp_path)
    secret = f"{web.url}/big.onnx?token=s3cr3t".replace("://", "://user:hunter22@")
    with running(f"named={secret}", app, "--device", "cpu", transport="lane", variables=variables) as server:
        assert [model["name"] for model in server.ready["models"]] == ["hub", "named"]
        answers(server, {"named": 3.0, "hub": 2.0})
    assert not any("s3cr3t" in line or "hunter22" in line for line in server.log)
    with running("--config", file, "--processes", "2", transport="lane", variables=variables) as server:
        assert server.ready["models"][0]["batching"].startswith("batches of up to 2 rows")
        answers(server, {"table": 2.0})

    def printed(*arguments: str) -> str:
        done = run_command(*arguments, variables=variables)
        assert done.returncode == 0, done.stderr
        assert "s3cr3t" not in done.stdout + done.stderr
        return done.stdout

    web.requests.clear()
    assert 'name: "twice"' in printed("config", f"{web.url}/twice.onnx")
    assert web.paths() == ["/twice.onnx"]
    address = f"{web.url}/twice.onnx"
    assert f"{address}?..." in printed("inspect", f"{address}?token=s3cr3t", "--no-measure", "--json")


def test_a_tokenizer_can_be_elsewhere(tmp_path: Path, web: WebServer, hub: FakeHub) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    numbers = {"[PAD]": 0, "[UNK]": 1, "cat": 5, "sat": 7}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    mean = small.mean_of_numbers(tmp_path / "mean.onnx").read_bytes()
    hub.commit("org/repo", {"tokenizer.json": words.to_str().encode(), "onnx/mean.onnx": mean})
    app = tmp_path / "app.py"
    app.write_text(
        """
from tensorferry.serving import onnx, pipeline, step, tokenizer

alone = tokenizer("hf://org/repo/tokenizer.json", outputs=["input_ids"])
tokens = tokenizer("hf://org/repo/tokenizer.json", name="tokens", outputs=["input_ids", "attention_mask"])
mean = pipeline(
    "mean",
    step(tokens, outputs={"input_ids": "ids", "attention_mask": "mask"}),
    onnx("hf://org/repo/onnx/mean.onnx", name="average"),
)
"""
    )
    variables = variables_of(web, hub, tmp_path)
    with (
        running(app, "--device", "cpu", transport="lane", variables=variables) as server,
        InferenceClient(server.address) as client,
    ):
        found = client.infer("tokenizer", {"text": ["cat sat dog"]})
        assert found["input_ids"].tolist() == [[5, 7, 1]]
        found = client.infer("mean", {"text": ["cat sat", "cat"]})
        np.testing.assert_allclose(found["mean"], [6, 5])


@pytest.mark.parametrize("has_pooling", [True, False])
def test_an_encoder_of_the_hub_by_one_option(
    has_pooling: bool, tmp_path: Path, web: WebServer, hub: FakeHub
) -> None:
    sentence_encoder.build(tmp_path)
    tokens = sentence_encoder.without_pooling(onnx.load(tmp_path / "minilm.onnx"))
    files = {
        "onnx/model.onnx": tokens.SerializeToString(),
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
    }
    if has_pooling:
        files["1_Pooling/config.json"] = b'{"pooling_mode_cls_token": true}'
    hub.commit("org/repo", files)
    options = ("--embeddings", "hf://org/repo", "--device", "cpu")
    variables = variables_of(web, hub, tmp_path)
    if not has_pooling:
        refused = run_command("serve", *options, "--port", "0", variables=variables)
        assert refused.returncode == 1
        assert "declare the pooling that the encoder was trained with" in refused.stderr
        return
    with (
        running(*options, transport="lane", variables=variables) as server,
        InferenceClient(server.address) as client,
    ):
        found = client.infer("repo", {"text": ["a man", "the woman is eating"]})
    assert found["tokens"].tolist() == [4, 6]
    np.testing.assert_allclose(np.linalg.norm(found["embedding"], axis=1), 1, atol=1e-6)


def variables_of(web: WebServer, hub: FakeHub, folder: Path) -> Mapping[str, str]:
    return {
        "SSL_CERT_FILE": str(web.authorities),
        "HF_ENDPOINT": hub.server.url,
        "HF_HOME": str(folder / "hf"),
        "TENSORFERRY_MODEL_CACHE": str(folder / "cache"),
    }


def answers(server: ServerProcess, factors: Mapping[str, float]) -> None:
    with InferenceClient(server.address) as client:
        for name, factor in factors.items():
            np.testing.assert_array_equal(client.infer(name, {"x": X})["y"], factor * X)


def test_a_model_that_cannot_be_fetched_ends_the_start_with_one_line(
    tmp_path: Path, web: WebServer, hub: FakeHub
) -> None:
    options = ("--port", "0", "--log-level", "warning")
    variables = variables_of(web, hub, tmp_path)
    ended = run_command("serve", f"{web.url}/none.onnx?token=s3cr3t", *options, variables=variables)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tensorferry serve: ")
    assert "/none.onnx?...: there is no such file" in line
    assert "s3cr3t" not in line


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_that_is_fetching_a_model_stops_at_once(
    processes: str, tmp_path: Path, web: WebServer, hub: FakeHub
) -> None:
    asked, stopped = threading.Event(), threading.Event()

    def never(request: Request) -> Response:
        asked.set()
        stopped.wait()
        return Response(status=503)

    web.respond = never
    with subprocess.Popen(
        command("serve", "--processes", processes, f"{web.url}/m.onnx", "--port", "0"),
        env={**environment(), **variables_of(web, hub, tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert asked.wait(PATIENCE)
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE)
        stopped.set()
    assert process.returncode == 0, log
    assert "Traceback" not in log


def test_a_model_repository_in_s3_is_followed(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    files = s3.files()
    files.mkdir("polled")
    body, data = external.scaled(tmp_path / "model.onnx", 3.0)
    files.pipe_file("polled/models/a/1/model.onnx", body)
    files.pipe_file("polled/models/a/1/model.onnx_data", data)
    files.pipe_file("polled/models/a/config.pbtxt", b"max_batch_size: 4")
    options = ("--model-repository", "s3://polled/models", "--model-control", "poll")
    times = ("--repository-poll-seconds", "0.05", "--model-cache", tmp_path / "cache")
    with running(*options, *times, transport="lane", variables=s3.variables) as server:
        answers(server, {"a": 3.0})
        with InferenceClient(server.address) as client:
            files.pipe_file("polled/models/b/1/model.onnx", small.twice(tmp_path / "b.onnx").read_bytes())
            until(lambda: client.is_model_ready("b"))
            answers(server, {"a": 3.0, "b": 2.0})
            files.pipe_file("polled/models/a/1/model.onnx_data", np.full(3, 7, np.float32).tobytes())
            until(lambda: float(client.infer("a", {"x": X})["y"][0, 0]) == 7)
            files.rm("polled/models/b", recursive=True)
            until(lambda: not client.is_model_ready("b"))


def test_clients_load_models_of_a_repository_in_s3(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    files = s3.files()
    files.mkdir("explicit")
    files.pipe_file("explicit/a/1/model.onnx", small.twice(tmp_path / "a.onnx").read_bytes())
    options = ("--model-repository", "s3://explicit", "--model-control", "explicit")
    with (
        running(
            *options, "--model-cache", tmp_path / "cache", transport="lane", variables=s3.variables
        ) as server,
        InferenceClient(server.address) as client,
    ):
        assert not list(tmp_path.glob("cache/**/*.onnx"))
        client.load_model("a")
        answers(server, {"a": 2.0})
        files.pipe_file("explicit/c/1/model.onnx", small.twice(tmp_path / "c.onnx").read_bytes())
        client.load_model("c")
        answers(server, {"a": 2.0, "c": 2.0})
        client.unload_model("a")
