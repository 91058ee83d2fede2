"""`tensorferry infer` and the commands that `tensorferry describe` prints, against a real server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from support.processes import models
from support.processes.server import ServerProcess, command, environment

from tensorferry.client.cli import commands, infer

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
# Every datatype, as ONNX names it.
DATATYPES = {
    "BOOL": "true", "INT8": "-3", "INT16": "-3", "INT32": "-3", "INT64": "-3", "UINT8": "3", "UINT16": "3",
    "UINT32": "3", "UINT64": "18446744073709551615", "FP16": "0.5", "FP32": "0.5", "FP64": "0.5", "BF16": "0.5",
    "BYTES": '"word"',
}  # fmt: skip
# With the tools that `make tools` installs beside Python.
VARIABLES = {
    **environment(),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}
GRPCURL = shutil.which("grpcurl", path=VARIABLES["PATH"])


def run(
    server: ServerProcess, *arguments: str, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*command(*arguments)],
        capture_output=True,
        input=stdin,
        env={**environment(), "TENSORFERRY_TARGET": server.address},
        timeout=120,
    )


def outputs(printed: str | bytes) -> dict[str, object]:
    """Return the outputs of `tensorferry infer --format json` by name."""
    return {output["name"]: output["data"] for output in json.loads(printed)["outputs"]}


def test_digits_in_every_form(
    plain: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.load(DIGITS / "images.npy")
    file = str(DIGITS / "images.npy")
    np.savez(tmp_path / "images.npz", image=images.astype(np.float64))
    request = {
        "inputs": [
            {"name": "image", "shape": images.shape, "datatype": "UINT8", "data": images.ravel().tolist()}
        ]
    }

    def called(*arguments: str) -> dict[str, object]:
        assert infer.main(["digits", "--target", plain.address, "--format", "json", *arguments]) == 0
        return outputs(capsys.readouterr().out)

    expected = called("--input", f"image={file}")
    for arguments in (
        ["--input", file],
        ["--input", str(tmp_path / "images.npz")],
        ["--json", json.dumps(request)],
    ):
        assert called(*arguments) == expected
    # A single image, without its first axis.
    one = called("--input", json.dumps(images[0].tolist()), "--output", "label")
    assert one == {"label": expected["label"][:1]}  # type: ignore[index]
    for argument, stdin in (
        (["--input", "image=@-"], Path(file).read_bytes()),
        (["--json", "-"], json.dumps({"image": images.tolist()}).encode()),
    ):
        done = run(plain, "infer", "digits", *argument, "--format", "json", stdin=stdin)
        assert outputs(done.stdout) == expected, done.stderr
    assert infer.main(["digits", "--target", plain.address, "--random", "--rows", "2"]) == 0
    assert "label  INT64 [2]" in capsys.readouterr().out
    refused = run(plain, "infer", "digits", "--input", "image=seven")
    assert refused.returncode == 2
    assert refused.stderr.decode().startswith(
        "tensorferry infer: input 'image' of model 'digits' expects UINT8"
    )


def test_every_datatype(echoes: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for datatype, value in DATATYPES.items():
        arguments = ["--target", echoes.address, "--format", "json", "--input", f"x=[[{value}], [{value}]]"]
        assert infer.main([f"echo-{datatype}", *arguments]) == 0
        (output,) = json.loads(capsys.readouterr().out)["outputs"]
        assert (output["data"], output["shape"]) == ([json.loads(value)] * 2, [2, 1]), datatype


def test_the_commands_of_describe_run_as_printed(
    echoes: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short inputs are written out, long ones are random or zeros."""
    names = [f"echo-{datatype}" for datatype in DATATYPES] + ["long-FP32", "long-BYTES", "long-FP16"]
    for name in names:
        assert commands.describe([name, "--target", echoes.address]) == 0
        printed = capsys.readouterr().out.splitlines()
        (ours,) = [line for line in printed if line.startswith("tensorferry infer ")]
        (grpcurl,) = [line for line in printed if line.startswith(("grpcurl ", "echo '"))]
        assert infer.main([*shlex.split(ours)[2:], "--format", "json"]) == 0, ours
        (output,) = json.loads(capsys.readouterr().out)["outputs"]
        assert output["shape"] == ([1, 3, 50] if name.startswith("long") else [1, 1])
        if GRPCURL is not None:
            theirs = subprocess.run(grpcurl, shell=True, capture_output=True, env=VARIABLES, timeout=120)
            assert theirs.returncode == 0, (grpcurl, theirs.stderr)
            (output,) = json.loads(theirs.stdout)["outputs"]
            assert output["shape"] == (["1", "3", "50"] if name.startswith("long") else ["1", "1"])


@pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed: make tools installs it")
def test_grpcurl_gets_the_token_and_the_certificate(serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "a token"
    made = subprocess.run(
        command("token", "web", "--file", str(tmp_path / "tokens")), capture_output=True, env=environment()
    )
    assert made.returncode == 0, made.stderr
    token.write_bytes(made.stdout)
    server = serve(models.echo(tmp_path / "m.onnx"), "--auth-tokens", str(tmp_path / "tokens"))
    printed = run(server, "describe", "m", "--token-file", str(token), "--header", "x-a=b c").stdout.decode()
    for line in printed.splitlines():
        if line.startswith(("tensorferry infer", "grpcurl")):
            done = subprocess.run(
                line.replace("tensorferry infer", f"{sys.executable} -m tensorferry.server infer"),
                shell=True,
                capture_output=True,
                env={**VARIABLES, "TENSORFERRY_TARGET": server.address},
                timeout=120,
            )
            assert done.returncode == 0, (line, done.stderr)
            assert "--header" in line or "x-a: b c" in line
