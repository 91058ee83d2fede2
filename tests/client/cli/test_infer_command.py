"""`tensorferry infer` against a running server."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from client.calls import Output, refusal
from client.scripted import ScriptedServer, model

from tensorferry.client.cli import infer as command
from tensorferry.client.cli.array_files import read_array, write_array
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array


def saved(directory: Path, name: str, array: Array) -> str:
    path = directory / f"{name}.npy"
    np.save(path, array)
    return str(path)


def test_infer_prints_the_outputs(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    words = saved(tmp_path, "words", np.array(["a", "å"]))
    weights = saved(tmp_path, "weights", np.array([[1, 2.5]], np.float32))
    inputs = ["--input", f"words={words}", "--input", f"weights={weights}", "--parameter=word=a\x1b[2J"]
    assert command.main(["text", "--target", server.target, *inputs]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model text, version 2",
        "words  BYTES [2]",
        "['a', 'å']",
        "weights  FP32 [1, 2]",
        "[[1.  2.5]]",
        r"word = 'a\x1b[2J'",
    ]


def test_infer_sends_its_options(server: ScriptedServer, tmp_path: Path) -> None:
    requests = server.servicer.requests
    x = saved(tmp_path, "x", np.array([1]))
    options = ["--model-version", "7", "--request-id", "r1", "--output", "x", "--header", "X-Key=a=b"]
    parameters = [f"--parameter={pair}" for pair in ("b=true", "i=3", "f=0.5", "s=x=y", "t=2026_11", "n=nan")]
    assert command.main(["row", "--target", server.target, "--input", f"x={x}", *options, *parameters]) == 0
    (request,) = requests
    assert (request.model_version, request.id, request.outputs[0].name) == ("7", "r1", "x")
    sent = {
        name: getattr(value, str(value.WhichOneof("parameter_choice")))
        for name, value in request.parameters.items()
    }
    assert sent == {"b": True, "i": 3, "f": 0.5, "s": "x=y", "t": "2026_11", "n": "nan"}
    assert server.metadata_of("ModelInfer")["x-key"] == "a=b"


def test_infer_writes_files(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    server.servicer.models["m"] = model("m", {"a/b": "BF16 -1", "a:b": "BF16 -1"}, {})
    file = saved(tmp_path, "x", np.array([1.5, 2], ml_dtypes.bfloat16))
    out = tmp_path / "new" / "out"
    arguments = ["--input", f"a/b={file}", "--input", f"a:b={file}", "--output-dir", str(out)]
    assert command.main(["m", "--target", server.target, *arguments]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["a_b-2.npy", "a_b.npy"]
    array = np.load(out / "a_b.npy")
    assert array.dtype == np.float32
    assert array.tolist() == [1.5, 2]
    assert str(out / "a_b-2.npy") in capsys.readouterr().out
    # A file is no folder.
    assert command.main(["row", "--target", server.target, "--input", "x=1", "--output-dir", file]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry infer: [Errno ")
    assert error.count("\n") == 1


def test_bytes_are_written_without_loss(tmp_path: Path) -> None:
    plain = np.array([[b"a", b""], [b"\0b", b"long"]], object)
    path = write_array(tmp_path, "..plain", plain, set())
    assert path.name == "plain.npy"
    with path.open("rb") as file:
        np.testing.assert_array_equal(read_array(file).astype(object), plain)
    path = write_array(tmp_path, "zeros", np.array([b"a\0", b"b"], object), set())
    assert path.name == "zeros.jsonl"
    header, *elements = map(json.loads, path.read_text().splitlines())
    assert header == {"datatype": "BYTES", "shape": [2]}
    assert [base64.b64decode(element) for element in elements] == [b"a\0", b"b"]


WRONG: list[tuple[list[str], str]] = [
    (["--input", "x"], "input 'x' of model 'row' expects INT64 [1], got 'x': write JSON, such as x=[0], or"),
    (["--input", "x=/no/such.npy"], "'/no/such.npy' (No such file or directory)"),
    (["--input", "x=@/no/such"], "'/no/such' (No such file or directory)"),
    (["--input", f"x={__file__}"], "name a file that numpy.save wrote"),
    (["--input", "y=1"], "--input expects an input of model 'row' ('x'), got 'y': name one of these"),
    (["--input", "x=1", "--input", "1"], "--input expects each input once, got 'x' more than once"),
    (["--input", "x=1.5"], "input 'x' of model 'row' expects INT64 [1], got 1.5 of type float: write integers"),
    (["--input", "/no/such.npz"], "which cannot be read ([Errno 2] No such file or directory: '/no/such.npz')"),
    (["--input", "x=a.npz"], "got the archive 'a.npz': write --input a.npz, which names its arrays"),
    (["--json", "/no/such"], "--json expects a file that can be read, got '/no/such' (No such file"),
    (["--json", "{"], '--json expects a JSON object such as {"x": [[1, 2]]}, got'),
    (["--json", '{"y": 1}'], "--json expects an input of model 'row' ('x'), got 'y'"),
    (["--json", '{"inputs": {"x": 1}}'], "--json: 'inputs' expects a list of objects"),
    (["--json", '{"inputs": [], "input": 1}'], "--json expects the keys 'inputs', 'outputs', 'parameters', 'id'"),
    (["--json", '{"inputs": [], "parameters": [1]}'], "--json: 'parameters' expects a dict, got [1]"),
    (["--json", '{"inputs": [], "outputs": [{}]}'], "--json: the name of an output expects a str, got None"),
    (["--json", '{"inputs": [{"name": "x"}]}'], "--json: input 'x' expects data, got none"),
    (
        ["--json", '{"inputs": [{"name": "x", "data": [1], "datatype": "FP32"}]}'],
        "input 'x' of model 'row' expects INT64 [1], got 'FP32' of type str: write 'INT64', or leave it out",
    ),
    (["--json", '{"inputs": [{"name": "x", "data": [1], "shape": [-1]}]}'], "expects a shape such as [1, 2]"),
    (
        ["--json", '{"inputs": [{"name": "x", "data": [1], "parameters": {"binary_data_size": 8}}]}'],
        "--json: input 'x' expects the keys 'name', 'shape', 'datatype', 'data', got 'parameters'",
    ),
    (["--classes", "x=0"], "argument --classes: expected NAME=N with N of at least 1, got 'x=0'"),
    (
        ["--json", '{"inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": true}}]}'],
        "--json: output 'x': 'parameters' expects the keys 'classification', got 'binary_data'",
    ),
    (["--rows", "2"], "argument --rows: it belongs to --random: add --random, or leave it out"),
    (["--seed", "x"], "argument --seed: expected a whole number from 0 to 1000000000000000000, got 'x'"),
    (["--random", "--rows", "2"], "expects INT64 [1], got --rows 2: leave --rows out, or write --rows 1"),
    (["--random", "--shape", "y:2"], "--shape expects an input of model 'row', got 'y': name one of 'x'"),
    (["--random", "--shape", "x:2"], "expects INT64 [1], got the shape [2]: give --shape all axes"),
    (["--random", "--shape", "x:-2"], "argument --shape: expected [NAME:]DIMS, such as x:2,16, got 'x:-2'"),
    (["--json", "-", "--input", "x=@-"], "stdin can be read once, got it 2 times: name files for the others"),
    (["--format", "json", "--output-dir", "d"], "argument --output-dir: not allowed with argument --format"),
    (["--parameter", "=1"], "argument --parameter: expected NAME=VALUE, got '=1'"),
    (["--ca-file", "/no/such"], "tls ca_file expects a PEM file, got '/no/such' (No such file or directory)"),
    (["--cert-file", "c.pem"], "Tls expects cert_file and key_file together, got cert_file='c.pem' and key_file=None"),
    (["--parameter", "a=1", "--parameter", "a=2"], "argument --parameter: 'a' is given more than once"),
    ([], "model 'row' expects the inputs 'x', got none: add 'x'"),
]  # fmt: skip


def test_a_bad_argument_exits_with_2(server: ScriptedServer, capsys: Output) -> None:
    for arguments, text in WRONG:
        error = refusal(capsys, command.main, ["row", "--target", server.target, *arguments])
        assert text in error, arguments
        assert error.startswith("tensorferry infer: ")


def test_damaged_files_are_refused(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    array = Path(saved(tmp_path, "x", np.arange(100)))
    array.write_bytes(array.read_bytes().replace(b"{'descr'", b"{('escr'"))
    archive = tmp_path / "all.npz"
    np.savez_compressed(archive, x=np.arange(100))
    content = archive.read_bytes()
    archive.write_bytes(content[:60] + b"\xff" * 20 + content[80:])
    for value in (f"x={array}", str(archive)):
        error = refusal(capsys, command.main, ["row", "--target", server.target, "--input", value])
        assert "which cannot be read" in error


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path, "objects", np.array([object()], object))
    with Path(path).open("rb") as file, pytest.raises(ValueError, match="allow_pickle"):
        read_array(file)


def array_in(request: pb.ModelInferRequest, index: int = 0) -> Array:
    tensor = request.inputs[index]
    kind = tensors.datatype(tensor.datatype)
    return tensors.decode_raw(request.raw_input_contents[index], kind, tensor.shape)


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


PROTOCOL_FORM = {
    "id": "r7",
    "inputs": [
        {"name": "words", "shape": [2], "datatype": "BYTES", "data": ["a", {"b64": "/w=="}]},
        {"name": "weights", "shape": [1, 2], "datatype": "FP32", "data": [1, "NaN"]},
    ],
    "outputs": [{"name": "words"}],
    "parameters": {"priority": 1},
}


@pytest.mark.parametrize("source", ["inline", "file", "stdin"])
def test_a_request_of_the_protocol_in_json(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    requests = server.servicer.requests
    text = json.dumps(PROTOCOL_FORM)
    give_stdin(monkeypatch, text.encode())
    (tmp_path / "r.json").write_text(text)
    given = {"inline": text, "file": str(tmp_path / "r.json"), "stdin": "-"}[source]
    assert (
        command.main(["text", "--target", server.target, "--json", given, "--parameter", "priority=2"]) == 0
    )
    (request,) = requests
    assert (request.id, [output.name for output in request.outputs]) == ("r7", ["words"])
    assert request.parameters["priority"].int64_param == 2
    assert array_in(request, 0).tolist() == [b"a", b"\xff"]
    np.testing.assert_array_equal(array_in(request, 1), np.array([[1, np.nan]], np.float32))


def test_classes_of_an_output(server: ScriptedServer) -> None:
    outputs = '"outputs": [{"name": "x", "parameters": {"classification": 3}}]'
    for arguments in (
        ["--input", "x=1", "--classes", "x=3"],
        ["--input", "x=1", "--classes", "x=3", "--output", "x"],
        ["--json", f'{{"inputs": [{{"name": "x", "data": [1]}}], {outputs}}}'],
    ):
        assert command.main(["row", "--target", server.target, *arguments]) == 0
        (output,) = server.servicer.requests.pop().outputs
        assert (output.name, output.parameters["classification"].int64_param) == ("x", 3)


def test_a_map_of_names_in_json_and_an_option_together(server: ScriptedServer) -> None:
    requests = server.servicer.requests
    arguments = ["--json", '{"words": ["a", "b"]}', "--input", "weights=[3, 4]"]
    assert command.main(["text", "--target", server.target, *arguments]) == 0
    assert array_in(requests[0], 0).tolist() == [b"a", b"b"]
    assert array_in(requests[0], 1).tolist() == [[3, 4]]


def test_an_input_called_inputs(server: ScriptedServer) -> None:
    server.servicer.models["m"] = model("m", {"inputs": "INT64 -1"}, {})
    requests = server.servicer.requests
    for text in ('{"inputs": [4, 5]}', '{"inputs": [{"name": "inputs", "data": [4, 5]}]}', "[4, 5]"):
        assert command.main(["m", "--target", server.target, "--json", text]) == 0
    assert [array_in(request).tolist() for request in requests] == [[4, 5]] * 3


BYTES_VALUES = [
    ("words=hello", [b"hello"]), ("hello", [b"hello"]), ("words=a=b", [b"a=b"]), ("words=", [b""]), ("words=3", [b"3"]),
    ('words={"a": 1}', [b'{"a": 1}']), ('words="x.npy"', [b"x.npy"]), ('["a", "b"]', [b"a", b"b"]), ("words=[]", []),
    ("words=@{file}", [b"\xff\0=["]), ("@{file}", [b"\xff\0=["]), ("@-", [b"piped\n"]),
]  # fmt: skip


def test_bytes(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    server.servicer.models["m"] = model("m", {"words": "BYTES -1"}, {})
    (tmp_path / "f").write_bytes(b"\xff\0=[")
    give_stdin(monkeypatch, b"piped\n")
    for option, expected in BYTES_VALUES:
        arguments = ["--input", option.replace("{file}", str(tmp_path / "f"))]
        assert command.main(["m", "--target", server.target, *arguments]) == 0
        assert array_in(server.servicer.requests.pop()).tolist() == expected
    capsys.readouterr()
    for option in ("words=[a]", 'words="a', "words=[1]"):
        said = refusal(capsys, command.main, ["m", "--target", server.target, "--input", option])
        assert "input 'words' of model 'm' expects" in said


def test_a_file_after_at_has_json_or_an_array(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.servicer.models["m"] = model("m", {"x": "FP64 -1"}, {})
    requests = server.servicer.requests
    (tmp_path / "x.json").write_text("[1.5]")
    array = saved(tmp_path, "x", np.array([1.5]))
    give_stdin(monkeypatch, Path(array).read_bytes())
    for option in (f"x=@{tmp_path / 'x.json'}", f"x=@{array}", f"x={array}", array, "x=@-"):
        assert command.main(["m", "--target", server.target, "--input", option]) == 0
    assert [array_in(request).tolist() for request in requests] == [[1.5]] * 5


def test_an_archive_names_the_inputs(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    requests = server.servicer.requests
    file = tmp_path / "a=b.npz"
    np.savez(file, words=np.array(["a"]), weights=np.array([[1.0, 2.0]]))
    assert command.main(["text", "--target", server.target, "--input", str(file)]) == 0
    assert array_in(requests[0], 0).tolist() == [b"a"]
    assert array_in(requests[0], 1).dtype == np.float32
    for model_name, value, said in (
        ("row", str(file), "an input of model 'row' ('x'), got 'words'"),
        ("text", "[1]", "expects NAME=VALUE, because model 'text' has the inputs 'words', 'weights'"),
    ):
        words = [model_name, "--target", server.target, "--input", value]
        assert said in refusal(capsys, command.main, words)


def test_random_inputs(server: ScriptedServer) -> None:
    datatypes = [name for name in tensors.DATATYPES if name != "BF16"]
    server.servicer.models["m"] = model("m", {f"x:{name}": f"{name} -1 2" for name in datatypes}, {})
    requests = server.servicer.requests
    call = ["m", "--target", server.target, "--random"]
    for more in ([], ["--seed", "0"], ["--seed", "1"], ["--rows", "3", "--input", "x:INT32=[7, 8]"]):
        assert command.main([*call, *more]) == 0
    first, same, other, rows = requests
    assert first.raw_input_contents == same.raw_input_contents
    assert first.raw_input_contents != other.raw_input_contents
    assert {tuple(tensor.shape) for tensor in first.inputs} == {(1, 2)}
    shapes = {tensor.name: list(tensor.shape) for tensor in rows.inputs}
    assert shapes.pop("x:INT32") == [1, 2]
    assert set(map(tuple, shapes.values())) == {(3, 2)}
    words = array_in(first, datatypes.index("BYTES"))
    assert all(len(word) == 8 and word.isalpha() for word in words.flat)
    assert command.main([*call, "--rows", "0"]) == 0
    assert {tuple(tensor.shape) for tensor in requests[-1].inputs} == {(0, 2)}


def test_random_inputs_with_open_axes(server: ScriptedServer, capsys: Output) -> None:
    server.servicer.models["m"] = model("m", {"a:0": "INT64 -1 -1", "b": "BF16 2"}, {})
    requests = server.servicer.requests
    call = ["m", "--target", server.target, "--random"]
    assert command.main([*call, "--shape", "a:0:2,16"]) == 0
    assert command.main([*call, "--shape", "a:0:16", "--rows", "2"]) == 0
    assert [[list(tensor.shape) for tensor in sent.inputs] for sent in requests[:2]] == [[[2, 16], [2]]] * 2
    assert set(array_in(requests[0]).flat) == {0, 1}
    assert "choose its axes, such as --shape a:0:2,8" in refusal(capsys, command.main, [*call, "--rows", "2"])
    assert "--shape expects NAME:DIMS" in refusal(capsys, command.main, [*call, "--shape", "2"])


def test_the_answer_as_json(server: ScriptedServer, capsys: Output) -> None:
    floats = '[1.5, "NaN", "Infinity", "-Infinity"]'
    server.servicer.models["m"] = model(
        "m", {"h": "FP16 -1", "w": "BYTES -1", "n": "UINT64 -1", "e": "FP32 -1 2", "s": "BOOL"}, {}
    )
    given = f'{{"h": {floats}, "w": ["a", {{"b64": "/w=="}}], "n": [18446744073709551615, 1], "e": [], "s": true}}'
    arguments = ["--json", given, "--format", "json", "--request-id", "r", "--parameter", "p=0.5"]
    assert command.main(["m", "--target", server.target, *arguments]) == 0
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {
        "model_name": "m",
        "model_version": "2",
        "id": "r",
        "parameters": {"p": 0.5},
        "outputs": [
            {"name": "h", "datatype": "FP16", "shape": [4], "data": [1.5, "NaN", "Infinity", "-Infinity"]},
            {"name": "w", "datatype": "BYTES", "shape": [2], "data": ["a", {"b64": "/w=="}]},
            {"name": "n", "datatype": "UINT64", "shape": [2], "data": [18446744073709551615, 1]},
            {"name": "e", "datatype": "FP32", "shape": [0, 2], "data": []},
            {"name": "s", "datatype": "BOOL", "shape": [], "data": [True]},
        ],
    }


def test_long_arrays_are_shortened(server: ScriptedServer, capsys: Output) -> None:
    server.servicer.models["m"] = model(
        "m", {"x": "INT64 -1", "w": "BYTES -1", "b": "BF16 -1", "s": "BOOL"}, {}
    )
    given = {"x": list(range(1000)), "w": ["w" * 500, "\x1b[2J"], "b": [0.5], "s": False}
    assert command.main(["m", "--target", server.target, "--json", json.dumps(given)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model m, version 2",
        "x  INT64 [1000]",
        "[  0   1   2 ... 997 998 999]",
        "w  BYTES [2]",
        f"['{'w' * 59}... (500 bytes),",
        r" '\x1b[2J']",
        "b  BF16 [1]",
        "[0.5]",
        "s  BOOL []",
        "False",
    ]


def test_all_outputs_in_one_file(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    server.servicer.models["m"] = model("m", {"file": "BF16 -1", "a/b": "BYTES -1"}, {})
    out = str(tmp_path / "out.npz")
    call = ["m", "--target", server.target, "--output-file", out, "--input", "file=[1.5]"]
    assert command.main([*call, "--input", "a/b=å"]) == 0
    with np.load(out) as archive:
        assert {name: archive[name].tolist() for name in archive} == {"file": [1.5], "a/b": ["å".encode()]}
    assert out in capsys.readouterr().out
    # What was written can be sent.
    requests = server.servicer.requests
    assert command.main(["m", "--target", server.target, "--input", out]) == 0
    assert array_in(requests[0], 1).tolist() == ["å".encode()]
    assert "output 'a/b' that end with a zero byte: use --output-dir or --format json" in refusal(
        capsys, command.main, [*call, "--json", '{"a/b": ["a\\u0000"]}']
    )
