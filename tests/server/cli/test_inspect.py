"""`tensorferry inspect` prints what a server would do with a model, as text or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from support.models import mixing, small

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.cli import inspect, show_config
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision
from tensorferry.server.onnx.inspection.inspection import Inspection
from tensorferry.server.onnx.measuring.batch_times import BatchTime
from tensorferry.server.onnx.measuring.core_layouts import LayoutTime
from tensorferry.server.onnx.measuring.measurements import Measurements
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.startup import print_ready_line


def in_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> list[dict[str, Any]]:
    assert inspect.main([*map(str, argv), "--json"]) in (0, 1)
    printed = json.loads(capsys.readouterr().out)
    assert printed["form"] == 1
    models: list[dict[str, Any]] = printed["models"]
    return models


def test_a_refused_model_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixing.scaled(tmp_path / "m.onnx")
    assert inspect.main([str(path), "--no-measure", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == f"m  (onnx, {path})"
    assert "verdict   REFUSED: each request runs alone; unbatched" in lines
    assert "because   ReduceMax greatest reduces over the batch axis" in lines
    assert (
        "change    compute over the axes of one row, such as x.mean(dim=1) instead of x.mean(), or" in lines
    )
    assert "measured  nothing: --no-measure" in lines
    assert printed.err == ""
    assert inspect.main([str(path), "--no-measure", "--device", "cpu", "--fail-if-unbatched"]) == 3
    batched = small.twice(tmp_path / "batched.onnx")
    assert inspect.main([str(batched), "--no-measure", "--device", "cpu", "--fail-if-unbatched"]) == 0


def test_models_that_cannot_be_loaded_do_not_keep_others_from_being_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = small.twice(tmp_path / "good.onnx")
    sequence = small.sequence(tmp_path / "sequence.onnx")
    argv = ["absent.onnx", str(good), str(sequence), "--no-measure", "--json", "--device", "cpu"]
    assert inspect.main(argv) == 1
    printed = capsys.readouterr()
    absent, loaded, refused = json.loads(printed.out)["models"]
    assert absent == {"argument": "absent.onnx", "loaded": False, "error": "absent.onnx: no such file"}
    assert loaded["loaded"] is True
    assert "which the protocol cannot carry; export the model with tensors" in refused["error"]
    first, second = printed.err.splitlines()
    assert first == "tensorferry inspect: absent.onnx: no such file"
    assert second.startswith(f"tensorferry inspect: {sequence}: output")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["m.onnx", "--sizes", "0"], "--sizes: is '0'; it must be numbers of rows from 1"),
        (["m.onnx", "--measure-seconds", "inf"], "--measure-seconds: is 'inf'; it must be a number above 0"),
        (["m.onnx", "--sise", "1"], "unknown flag --sise"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        inspect.main(argv)
    assert ended.value.code == 2
    streams = capsys.readouterr()
    assert said in streams.err
    assert (len(streams.err.splitlines()), streams.out) == (1, "")


def test_a_wrong_value_of_an_option_of_the_server_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["m.onnx", "--max-batch-size", "-1"]) == 2
    assert capsys.readouterr().err.startswith("tensorferry inspect: --max-batch-size is '-1'; it must be")


def test_the_lengths_of_variable_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, once = small.echo(tmp_path / "m.onnx"), ("--device", "cpu", "--sizes", "1")
    (model,) = in_json(capsys, path, *once, "--length", "7", "--length", "n=9")
    assert model["measured"]["lengths"] == {"n": 9}
    assert inspect.main([str(path), *once, "--length", "7"]) == 0
    assert "lengths   n 7 (--length gives others)" in capsys.readouterr().out.splitlines()
    assert inspect.main([str(path), *once, "--length", "m=7"]) == 1
    assert "--length names the axis 'm'; the inputs have 'n'" in capsys.readouterr().err


# The command prints made-up measurements.

JSON = """{"form": 1, "models": [{
  "argument": "m.onnx",
  "loaded": true,
  "name": "m",
  "version": "1",
  "file": "m.onnx",
  "kind": "onnx",
  "inputs": [
    {"name": "x", "datatype": "FP32", "shape": [-1, 3], "counts_rows": true, "batch_axis": 0},
    {"name": "scale", "datatype": "FP32", "shape": [], "counts_rows": false, "batch_axis": null}
  ],
  "optional_inputs": [],
  "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1], "counts_rows": true, "batch_axis": 0}],
  "probable_states": {}, "devices": ["cpu"], "nodes_by_provider": {},
  "batching": {"verdict": "proved", "description": "batches of up to 2 rows (proved)", "max_batch_size": 2, "shares_batches": true, "reason": "", "evidence": "9 batches of 2 rows", "rewritten": false, "cures": []},
  "measured": {
    "device": "cpu",
    "memory": "peak resident memory",
    "loaded_bytes": 12582912,
    "lengths": {},
    "padding_waste": null,
    "batches": [
      {"rows": 1, "ms": 1.0, "ms_per_row": 1.0, "rows_per_second": 1000.0, "runs": 300, "memory_bytes": 0},
      {"rows": 2, "ms": 1.2, "ms_per_row": 0.6, "rows_per_second": 1666.6666666666667, "runs": 250, "memory_bytes": 1572864},
      {"rows": 8, "ms": 4.0, "ms_per_row": 0.5, "rows_per_second": 2000.0, "runs": 75, "memory_bytes": 5242880}
    ],
    "stopped": "",
    "core_layouts": [
      {"sessions": 1, "threads": 2, "rows": 8, "rows_per_second": 1000.0, "ms_alone": 1.0},
      {"sessions": 2, "threads": 1, "rows": 8, "rows_per_second": 1500.0, "ms_alone": 2.0}
    ],
    "better_core_layout": {"instances": 2, "threads": 1}
  },
  "not_measured": "",
  "best_batch_size": 8,
  "best_rule": "the fewest rows with at least 95 % of the most rows/s",
  "full_batch_rows": 2,
  "latency_bounds": [
    {"ms": 0.5, "alone": null, "after_another_batch": null},
    {"ms": 5.0, "alone": {"rows": 8, "ms": 4.0, "rows_per_second": 2000.0}, "after_another_batch": {"rows": 2, "ms": 1.2, "rows_per_second": 1666.6666666666667}}
  ]
}]}"""


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str, **changes: Any
) -> str:
    """Return what the command prints of a model whose batches take 1.0, 1.2 and 4.0 ms."""
    fp32 = DATATYPES["FP32"]
    fields: dict[str, Any] = {
        "name": "m",
        "version": "1",
        "path": Path("m.onnx"),
        "kind": "onnx",
        "signature": Signature(
            (TensorSpec("x", fp32, ("batch", 3)), TensorSpec("scale", fp32, ())),
            (TensorSpec("score", fp32, ("batch",)),),
        ),
        "decision": BatchingDecision(
            2, True, "batches of up to 2 rows (proved)", "proved", "", "9 batches of 2 rows"
        ),
        "devices": ("cpu",),
        "measured": Measurements(
            ("cpu",),
            (BatchTime(1, 1e-3, 300, 0), BatchTime(2, 1.2e-3, 250, 3 << 19), BatchTime(8, 4e-3, 75, 5 << 20)),
            "peak resident memory",
            12 << 20,
            layouts=(LayoutTime(1, 2, 8, 1000.0, 1e-3), LayoutTime(2, 1, 8, 1500.0, 2e-3)),
        ),
    }
    monkeypatch.setattr(inspect, "inspect_model", lambda *_: [Inspection(**{**fields, **changes})])
    assert inspect.main(["m.onnx", *argv]) == 0
    return capsys.readouterr().out


def test_the_text_of_a_measured_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = [word for bound in ("0.5", "1", "2.4", "5", "9") for word in ("--latency-ms", bound)]
    assert (
        printed(capsys, monkeypatch, *bounds)
        == """\
m  (onnx, m.onnx)

input     x      FP32  [-1, 3]  axis 0 counts rows
input     scale  FP32  []       requests with equal values share a batch
output    score  FP32  [-1]     axis 0 counts rows

verdict   PROVED: the graph keeps rows apart; batches of up to 2 rows
ran       9 batches of 2 rows

measured  on cpu; loading took 12.0 MiB of resident memory
memory    peak resident memory

      rows          ms      µs/row      rows/s    runs    memory MiB
         1       1.000     1,000.0       1,000     300           0.0
         2       1.200       600.0       1,670     250           1.5
         8       4.000       500.0       2,000      75           5.0

best      8 rows, the fewest rows with at least 95 % of the most rows/s; 2.0 times as many as one by
          one; serve it with --max-batch-size 8
full      a full batch has 2 rows: --max-batch-size
0.5 ms    no batch: one of 1 row takes 1.000 ms
1 ms      a batch of up to 1 row (1.000 ms): 1,000 rows/s; none if a request has to wait for the
          batch before it
2.4 ms    a batch of up to 2 rows (1.200 ms): 1,670 rows/s, also after the batch before it
5 ms      a batch of up to 8 rows (4.000 ms): 2,000 rows/s; up to 2 rows (1.200 ms): 1,670 rows/s if
          a request has to wait for the batch before it
9 ms      a batch of up to 8 rows (4.000 ms): 2,000 rows/s, also after the batch before it

cores     --instances 2 --threads 1 carries 1.50 times the rows/s of one session, the default; a row
          alone takes 2.00 times as long, and each session has a copy of the weights

  sessions     threads      rows/s    ms alone   in batches of 8 rows
         1           2       1,000       1.000
         2           1       1,500       2.000

"""
    )


def test_the_json_of_a_measured_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = ("--latency-ms", "0.5", "--latency-ms", "5")
    assert json.loads(printed(capsys, monkeypatch, "--json", *bounds)) == json.loads(JSON)


def test_text_of_other_kinds_and_verdicts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(**changes: Any) -> str:
        return printed(capsys, monkeypatch, **changes)

    refused = text(
        decision=BatchingDecision(0, False, "unbatched (a; b)", "refused", "a; b", "", ("change it",))
    )
    assert (
        "verdict   REFUSED: each request runs alone; unbatched\nbecause   a; b\nchange    change it"
        in refused
    )
    assert "measured  on cpu, as batches would be; requests run alone; loading took" in refused
    assert "--max-batch-size" not in refused
    assert "on cpu, through the batcher" in text(kind="function")
    batches = (BatchTime(1, 1e-3, 5),)
    stopped = text(measured=Measurements(("cpu",), batches, stopped="a batch of 2 rows: it failed"))
    assert stopped.splitlines()[-2] == "stopped   a batch of 2 rows: it failed"
    padded = text(measured=Measurements(("cpu",), batches, padding_waste=0.25))
    assert "padding   25 % of the padded inputs is padding" in padded
    nothing = text(measured=Measurements(("cpu",), (), stopped="a batch of 1 rows: it failed"))
    assert "measured  nothing: a batch of 1 rows: it failed" in nothing


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tensors, axes and nodes in a model's file can have any character."""
    evil = "\x1b[31m\r\n\x07\u202e\x7f\x9b"
    x, y = f"x{evil}", f"y{evil}"
    dims = (f"b{evil}", f"s{evil}")
    mean = onnx.helper.make_node("ReduceMean", [x], [y], name=f"node{evil}", axes=[0], keepdims=1)
    path = small.save(tmp_path / "m.onnx", [mean], [small.value(x, dims=dims)], [small.value(y, dims=dims)])
    broken = onnx.load(path)
    broken.graph.node[0].op_type = f"No{evil}"
    onnx.save(broken, tmp_path / "broken.onnx")
    for program, *options in ((inspect, "--sizes", "1"), (inspect, "--json", "--no-measure"), (show_config,)):
        assert program.main([str(path), "--device", "cpu", *options]) == 0
        assert program.main([str(tmp_path / "broken.onnx"), "--device", "cpu", *options]) == 1
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])
        assert "[31m" in out
        assert all(line.startswith("    ") for line in err.rstrip("\n").split("\n")[1:])
    model = SimpleNamespace(name="m", version="1", signature=f"({x})", batching=y)
    app: Any = SimpleNamespace(
        config=ServerConfig(()),
        registry=SimpleNamespace(models=lambda: [model], unavailable=lambda: [x]),
        service=SimpleNamespace(ready=True),
        address="127.0.0.1:1",
        http_url=None,
        metrics_url=None,
    )
    print_ready_line(app)
    assert capsys.readouterr().out.strip("\n").isprintable()
