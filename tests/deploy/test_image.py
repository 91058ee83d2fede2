"""The images' build file, as far as it can be checked without a container runtime. tests/installs runs its
pip commands.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

import pytest
from deploy.manifests import DEPLOY, configuration
from support.dockerfile import Stage, arguments_of, stages
from support.wire.programs import CLIENTS, needs

from tensorferry.server.__main__ import main

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
STAGES = stages(DOCKERFILE)
# The stages that users build, with --target.
TARGETS = ("cpu", "cuda")
HADOLINT = CLIENTS / "manifests" / "bin" / "hadolint"


def chain(target: str) -> list[Stage]:
    """Return a stage and those that it begins with, the first of them first."""
    stage = STAGES[target]
    return [*(chain(stage.base) if stage.base in STAGES else []), stage]


def last(target: str, instruction: str) -> str:
    """Return the arguments that an instruction has in the image."""
    return [arguments for stage in chain(target) for arguments in stage.of(instruction)][-1]


@needs(HADOLINT)
def test_the_linter_has_no_remarks() -> None:
    linted = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


def test_bases_are_versions_of_python_that_the_tests_run_on() -> None:
    assert {stage.base for stage in STAGES.values()} - STAGES.keys() == {"python:${PYTHON}"}
    tag = re.fullmatch(r"(3\.\d+)-slim-[a-z]+", arguments_of(DOCKERFILE)["PYTHON"])
    assert tag is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {tag[1]}" in project["classifiers"]


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_each_file_that_is_copied_is_in_the_context(stage: Stage) -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    sent = {line[1:] for line in ignored if line.startswith("!")}
    for arguments in stage.of("COPY"):
        words = shlex.split(arguments)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in STAGES
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert source in sent, f"{source} is not sent to the builder: Dockerfile.dockerignore"
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize("target", TARGETS)
def test_the_server_has_no_rights_and_gets_signals(target: str) -> None:
    user, _, group = last(target, "USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    # A user is set once, and nothing runs as another one after it.
    assert sum(len(stage.of("USER")) for stage in chain(target)) == 1
    assert not STAGES[target].of("RUN")
    # A list starts the server without a shell, which would not pass SIGTERM on.
    assert json.loads(last(target, "ENTRYPOINT")) == ["tensorferry"]
    assert last(target, "STOPSIGNAL") == "SIGTERM"


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_arguments_are_those_of_a_server_for_other_machines(target: str) -> None:
    config = configuration(json.loads(last(target, "CMD")))
    assert config.host == "0.0.0.0"
    assert [str(path) for path in config.model_repositories] == ["/models"]
    assert str(config.port) in last(target, "EXPOSE").split()


def test_the_health_check_is_a_command_of_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    ((options, _, text),) = {last(target, "HEALTHCHECK").partition(" CMD ") for target in TARGETS}
    program, *arguments = json.loads(text)
    assert program == "tensorferry"
    # No server listens on this port: the arguments were understood, and the container is unhealthy.
    assert main([*arguments, "--target", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    (limit,) = re.findall(r"--timeout=(\d+)s", options)
    assert float(arguments[arguments.index("--timeout") + 1]) < float(limit)


def test_both_images_are_built_alike_and_only_from_pinned_packages() -> None:
    cpu, cuda = STAGES["build-cpu"], STAGES["build-cuda"]
    same = [(kind, text.replace("gpu.lock", "cpu.lock")) for kind, text in cuda.instructions]
    assert same == list(cpu.instructions)
    for stage in (cpu, cuda):
        installs = [text for text in stage.of("RUN") if "install --" in text]
        assert "--require-hashes" in installs[0]
        assert all("--no-deps" in text for text in installs)
