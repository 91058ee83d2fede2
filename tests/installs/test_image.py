"""The pip commands of the image's build file, run in a copy of its build context."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installs.environments import CHECK, MODEL, ROOT, interpreter
from support.dockerfile import arguments_of, stages

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
ENVIRONMENT = "/opt/tensorferry"


@pytest.mark.timeout(600)
def test_the_environment_of_the_cpu_image_serves(tmp_path: Path) -> None:
    found = stages(DOCKERFILE)
    version = arguments_of(DOCKERFILE)["PYTHON"].partition("-")[0]
    python = interpreter(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}, which the image has")
    made, context = tmp_path / "environment", tmp_path / "src"
    context.mkdir()
    for kind, arguments in (*found["sources"].instructions, *found["build-cpu"].instructions):
        if kind == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                copy(ROOT / source, context / target / (Path(source).name if target.endswith("/") else ""))
        elif kind == "RUN":
            # pip is that of the base image, which need not be in the new environment.
            command = arguments.replace(ENVIRONMENT, str(made)).replace("python -m venv", f"{python} -m venv")
            command = command.replace("pip --python", f"{sys.executable} -m pip -q --python")
            subprocess.run(command, shell=True, cwd=context, check=True, timeout=300)
    server = made / "bin" / "python"
    left = subprocess.run(
        [sys.executable, "-m", "pip", "--python", server, "list", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {package["name"] for package in json.loads(left.stdout)}
    assert {"tensorferry", "onnxruntime", "grpcio"} <= names
    # The build backend and what only it requires.
    assert not names & {"hatchling", "editables", "pathspec", "pluggy", "trove-classifiers", "tomlkit"}
    subprocess.run([sys.executable, "-m", "pip", "--python", server, "check"], check=True)
    checked = subprocess.run(
        [str(server), str(CHECK), str(MODEL), "lane", str(made / "bin" / "tensorferry")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
