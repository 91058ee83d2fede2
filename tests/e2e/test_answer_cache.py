"""--cache on a real server: which models keep answers, what is counted, and when answers are forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from e2e.fixtures import Serve
from support.models import small
from support.processes.server import ServerProcess, running

from tensorferry.client import InferenceClient

_APP = """
import numpy as np

from tensorferry.serving import FP32, model, onnx, pipeline, step

CALLS = [0]


def counted(x):
    CALLS[0] += 1
    return x * 0 + CALLS[0]


declared = {"inputs": {"x": FP32[-1]}, "outputs": {"y": FP32[-1]}, "check": False}
pure = model(**declared, name="pure", pure=True)(counted)
impure = model(**declared, name="impure")(counted)
first = model(**declared, name="first", pure=True)(counted)
both = pipeline("both", first, step(first, inputs={"x": "y"}, outputs={"y": "z"}))
named = pipeline("named", "pure")


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, pure=True)
def centred(x):
    return x - x.mean()


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1, -1]}, pure=True)
def spread(x):
    return [np.ones(int(abs(each)) % 5, np.float32) for each in x]


padded = pipeline("padded", spread, step(spread, inputs={"x": "x"}, outputs={"y": "z"}), outputs=["y", "z"])


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, streams=True, check=False)
def yields(x):
    yield x
"""
_WHY_NOT = {
    "impure": "function 'impure' is not declared with pure=True",
    "yields": "it answers in streams",
    "named": "its step 'pure' is another model, which can be replaced",
    "random": "its operator RandomNormalLike may draw random numbers",
}


def x(value: float) -> Mapping[str, Any]:
    return {"x": np.array([value], np.float32)}


def caches(server: ServerProcess) -> Mapping[str, Any]:
    return {name: model["cache"] for name, model in server.statuses().items()}


def test_models_that_give_equal_answers_keep_them(transport: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(_APP)
    small.written(
        tmp_path / "random.onnx",
        "(float[batch] x) => (float[batch] y) { noise = RandomNormalLike (x) y = Add (x, noise) }",
    )
    options = ("--cache", "1MiB", "--metrics-port", "0")
    with running(
        tmp_path / "app.py", tmp_path / "random.onnx", *options, transport=transport, logs_errors=True
    ) as server:
        with InferenceClient(server.address) as client:
            for name in ("pure", "both", "impure"):
                output = "z" if name == "both" else "y"
                answers = [float(client.infer(name, x(value))[output][0]) for value in (1, 2, 1, 1)]
                assert (answers[2:] == [answers[0]] * 2) == (name != "impure"), name
            statistics = client.statistics("pure")[0]
        found = caches(server)
        metrics = server.page()
    log = "".join(server.log)
    for name in ("pure", "both"):
        assert (found[name]["hits"], found[name]["misses"], found[name]["rows"]) == (2, 2, 2)
        assert f'tensorferry_cache_hits_total{{model="{name}",version="1"}} 2' in metrics
        assert f'tensorferry_cache_misses_total{{model="{name}",version="1"}} 2' in metrics
        assert f'nv_cache_num_hits_per_model{{model="{name}",version="1"}} 2' in metrics
    assert (statistics.cache_hit.count, statistics.cache_miss.count, statistics.success.count) == (2, 2, 4)
    assert statistics.executions == 2
    for name, why in _WHY_NOT.items():
        assert found[name] == {}
        assert f"model {name}: --cache has no effect on it: {why}" in log


def test_rows_that_depend_on_their_request_are_not_kept_alone(serve: Serve, tmp_path: Path) -> None:
    """A function that mixes rows, and rows that are padded to the longest of a request."""
    (tmp_path / "app.py").write_text(_APP)
    answers = []
    for options in ((), ("--cache", "1MiB")):
        with InferenceClient(serve(tmp_path / "app.py", *options).address) as client:
            sent = [[2, 4], [2], [4, 2, 2], [2, 4]]
            given = [
                (name, {"x": np.array(rows, np.float32)}) for name in ("centred", "padded") for rows in sent
            ]
            answers.append([client.infer(name, inputs)["y"].tolist() for name, inputs in given])
    assert answers[0] == answers[1]


def test_a_reload_forgets_the_answers(serve: Serve, tmp_path: Path) -> None:
    for name, cache in (("asks", "true"), ("refuses", "false")):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        small.written(folder / "model.onnx", "(float[batch, 1] x) => (float[batch, 1] y) { y = Add (x, x) }")
        (folder.parent / "config.pbtxt").write_text(f"response_cache {{ enable: {cache} }}")
    server = serve(
        *("--model-repository", tmp_path, "--model-control", "explicit", "--load-model", "*"),
        *("--cache", "1MiB", "--metrics-port", "0"),
    )
    row = {"x": np.ones((1, 1), np.float32)}
    with InferenceClient(server.address) as client:
        for _ in range(2):
            assert client.infer("asks", row)["y"] == 2
        assert caches(server)["asks"]["hits"] == 1
        assert caches(server)["refuses"] == {}
        text = "(float[batch, 1] x) => (float[batch, 1] y) { y = Mul (x, x) }"
        small.written(tmp_path / "asks" / "1" / "model.onnx", text)
        client.load_model("asks")
        assert caches(server)["asks"]["rows"] == 0
        assert client.infer("asks", row)["y"] == 1
