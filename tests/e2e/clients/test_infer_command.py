"""`tensorferry infer` and the commands that `tensorferry describe` prints, against a real server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.fixtures import Serve
from support.processes import models
from support.processes.server import ServerProcess, environment, run_command

from tensorferry.client.cli import commands, infer
from tensorferry.protos.tensors import DATATYPES

# With the tools that `make tools` installs beside Python.
VARIABLES = {
    **environment(),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}
GRPCURL = shutil.which("grpcurl", path=VARIABLES["PATH"])


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
    made = run_command("token", "web", "--file", tmp_path / "tokens")
    assert made.returncode == 0, made.stderr
    token.write_text(made.stdout)
    server = serve(models.echo(tmp_path / "m.onnx"), "--auth-tokens", str(tmp_path / "tokens"))
    target = {"TENSORFERRY_TARGET": server.address}
    options = ("--token-file", token, "--header", "x-a=b c")
    printed = run_command("describe", "m", *options, variables=target).stdout
    for line in printed.splitlines():
        if line.startswith(("tensorferry infer", "grpcurl")):
            done = subprocess.run(
                line.replace("tensorferry infer", f"{sys.executable} -m tensorferry.server infer"),
                shell=True,
                capture_output=True,
                env={**VARIABLES, **target},
                timeout=120,
            )
            assert done.returncode == 0, (line, done.stderr)
            assert "--header" in line or "x-a: b c" in line
