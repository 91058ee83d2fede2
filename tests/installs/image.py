"""The environment of an image, built by the build file's commands without a container."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from installs.environments import interpreter
from support.dockerfile import Stage, arguments_of, stages

_ENVIRONMENT = "/opt/tensorferry"
# The build backend and what only it requires.
_ONLY_TO_BUILD = {"hatchling", "editables", "pathspec", "pluggy", "trove-classifiers", "tomlkit"}


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a build file; `context` is the folder that the build command sends to the builder."""

    context: Path
    dockerfile: str
    target: str

    @property
    def python(self) -> Path | None:
        """The interpreter of the image's version, None if this machine has none."""
        return interpreter(self.version)

    @property
    def version(self) -> str:
        """The image's version of Python."""
        return arguments_of(self.context / self.dockerfile)["PYTHON"].partition("-")[0]

    @property
    def command(self) -> list[str]:
        """The program that a container runs, with its arguments."""
        stage = self._chain(self.target)
        return [word for kind in ("ENTRYPOINT", "CMD") for word in json.loads(_last(stage, kind))]

    def build(self, folder: Path, variables: Mapping[str, str]) -> Path:
        """Run the commands that make the image's environment, in a copy of its context; return its Python.

        Raise CalledProcessError, with the output, if one fails.
        """
        source = next(
            words.split()[0].removeprefix("--from=")
            for words in self._stages()[self.target].of("COPY")
            if _ENVIRONMENT in words
        )
        made, context = folder / "environment", folder / "src"
        context.mkdir(parents=True)
        for stage in self._chain(source):
            for kind, arguments in stage.instructions:
                if kind == "COPY":
                    *copied, target = arguments.split()
                    for name in copied:
                        into = context / target / (Path(name).name if target.endswith("/") else "")
                        _copy(self.context / name, into)
                elif kind == "RUN":
                    # pip is that of the base image, which need not be in the new environment.
                    command = arguments.replace(_ENVIRONMENT, str(made))
                    command = command.replace("python -m venv", f"{self.python} -m venv")
                    command = command.replace("pip --python", f"{sys.executable} -m pip -q --python")
                    _run(command, context, variables)
        return made / "bin" / "python"

    def _stages(self) -> dict[str, Stage]:
        return stages(self.context / self.dockerfile)

    def _chain(self, name: str) -> list[Stage]:
        """Return a stage after those that it is based on."""
        found = self._stages()
        chain = [found[name]]
        while chain[0].base in found:
            chain.insert(0, found[chain[0].base])
        return chain


def check_packages(python: Path) -> None:
    """Check that an image's environment has the server, all that it needs, and nothing of its build."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    listed = subprocess.run([*pip, "list", "--format", "json"], capture_output=True, text=True, check=True)
    names = {package["name"] for package in json.loads(listed.stdout)}
    assert {"tensorferry", "onnxruntime", "grpcio"} <= names, names
    assert not names & _ONLY_TO_BUILD, names
    consistent = subprocess.run([*pip, "check"], capture_output=True, text=True)
    assert consistent.returncode == 0, consistent.stdout


def _last(chain: list[Stage], kind: str) -> str:
    return [arguments for stage in chain for arguments in stage.of(kind)][-1]


def _run(command: str, folder: Path, variables: Mapping[str, str]) -> None:
    subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=dict(variables),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
