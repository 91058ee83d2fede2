from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.pages import ROOT
from support.processes.server import ServerProcess


@dataclass(frozen=True, slots=True)
class Place:
    """A directory like a reader's, the server that the pages use, and the environment variables of commands."""

    directory: Path
    server: ServerProcess
    variables: Mapping[str, str]

    def adapted(self, text: str) -> str:
        """Replace the default addresses in a command or code by those of the running server."""
        address, http = (
            self.server.address,
            str(self.server.ready.get("http", "127.0.0.1:8000")).removeprefix("http://"),
        )
        for default, own in (("8001", address), ("8002", self.metrics), ("8000", http)):
            text = text.replace(f"127.0.0.1:{default}", own)
            text = text.replace(f"localhost:{default}", own.replace("127.0.0.1", "localhost"))
        return text

    def has(self, program: str) -> bool:
        """Return whether commands find a program, such as one that `make tools` installs."""
        return shutil.which(program, path=self.variables["PATH"]) is not None

    @property
    def metrics(self) -> str:
        return str(self.server.ready["metrics"]).removeprefix("http://").removesuffix("/metrics")


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[Place]:
    """The directory with a server on free ports, which must stop without an error."""
    with contextlib.chdir(directory):
        server = ServerProcess.start(*arguments, "--metrics-port=0", "--http-port=0", transport="lane")
    yield Place(directory, server, variables(directory, server))
    assert server.stop() == 0, server.log


def variables(directory: Path, server: ServerProcess) -> dict[str, str]:
    """Return variables with which `tensorferry` is this checkout's, and calls this server unless told otherwise.

    Load tests are as short as possible, and not as long as the pages say.
    """
    address, metrics = server.address, str(server.ready["metrics"])
    bin_directory = directory / f"bin-{server.process.pid}"
    bin_directory.mkdir()
    program, python = bin_directory / "tensorferry", shlex.quote(sys.executable)
    program.write_text(
        "#!/bin/sh\n"
        "command=$1; shift\n"
        'case "$command $*" in\n'
        f'*--target*) ;;\nmodels*|describe*|infer*|ready*) set -- "$@" --target {address} ;;\n'
        f'top*) set -- "$@" --target {metrics} ;;\n'
        # The last of equal flags counts. The command fails if a busy machine answers no request in this time.
        'bench*) set -- "$@" --warmup 0 --processes 1 --duration\n'
        f'for seconds in 0.2 2 8; do {python} -m tensorferry.server bench "$@" $seconds && exit; done; exit 1 ;;\nesac\n'
        f'exec {python} -m tensorferry.server "$command" "$@"\n'
    )
    programs = [program]
    if (curl := shutil.which("curl")) is not None:
        # Without the flag, it ends with 0 whatever the server answers.
        programs.append(bin_directory / "curl")
        programs[-1].write_text(f'#!/bin/sh\nexec {curl} --fail-with-body "$@"\n')
    for each in programs:
        each.chmod(each.stat().st_mode | stat.S_IXUSR)
    packages = os.pathsep.join(str(ROOT / name) for name in ("protos", "batcher", "server", "client"))
    path = os.pathsep.join((str(bin_directory), str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": packages}


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("reader")
    for name in ("examples", "deploy"):
        (directory / name).symlink_to(ROOT / name)
    models = directory / "models" / "digits" / "1"
    models.mkdir(parents=True)
    (models / "model.onnx").symlink_to(ROOT / "examples" / "digits" / "digits.onnx")
    with serving(directory, "examples/digits/digits.onnx") as place:
        yield place
