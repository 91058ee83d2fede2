"""The manifests as kustomize builds them, compared with their schemas, and the server's reading of their arguments."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.wire.programs import CLIENTS, needs

from tensorferry.server.config.load import load_config
from tensorferry.server.config.option import Option
from tensorferry.server.config.server_config import OPTIONS, ServerConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHECK = Path(__file__).with_name("check_manifests.py")
KUSTOMIZE = CLIENTS / "kustomize"
# The job that some alerts name.
(JOB_OF_ALERTS,) = set(re.findall(r'job="(\w+)"', (DEPLOY / "prometheus" / "alerts.yml").read_text()))
MANIFEST_TOOLS = needs(KUSTOMIZE, CLIENTS / "manifests" / ".done", CLIENTS / "kserve" / ".done")

Document = Mapping[str, Any]


@functools.cache
def _checker(environment: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that checks texts until this one ends."""
    words: list[str | Path] = [CLIENTS / environment / "bin" / "python", CHECK, *arguments]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.communicate)
    return started


def checked(text: str, environment: str, *arguments: str) -> list[Document]:
    """Return the documents of a text, which must fit their schemas."""
    checker = _checker(environment, *arguments)
    assert checker.stdin is not None
    assert checker.stdout is not None
    checker.stdin.write(json.dumps(text) + "\n")
    checker.stdin.flush()
    answer = checker.stdout.readline()
    assert answer, f"{CHECK.name} has ended with status {checker.wait()}, see its stderr; it got:\n{text}"
    result = json.loads(answer)
    assert not result["errors"], "\n".join(result["errors"])
    return list(result["documents"])


def built(folder: Path) -> str:
    ended = subprocess.run([KUSTOMIZE, "build", folder], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def with_component(folder: Path, component: str, added: Path) -> Path:
    """Write an overlay of a folder and a component into an empty folder, which is returned."""
    # kustomize takes no absolute paths.
    resource = os.path.relpath(folder, added)
    part = os.path.relpath(DEPLOY / "kubernetes" / "components" / component, added)
    (added / "kustomization.yaml").write_text(f"resources: [{resource}]\ncomponents: [{part}]\n")
    return added


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pod_of(documents: list[Document]) -> tuple[Any, Any]:
    """Return the pod of the only Deployment, and the pod's only container."""
    (deployment,) = of_kind(documents, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def selectors_of(documents: list[Document]) -> list[Document]:
    """Return all labels by which these documents select the pods of the server."""
    found = [
        each["spec"]["selector"]["matchLabels"]
        for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor")
        for each in of_kind(documents, kind)
    ]
    found += [service["spec"]["selector"] for service in of_kind(documents, "Service")]
    found += [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(documents, "NetworkPolicy")]
    return found


def configuration(arguments: list[str]) -> ServerConfig:
    """Return the server's configuration for a container's arguments; raise ConfigError or KeyError for
    unknown ones.
    """
    options: Mapping[str, Option] = {option.flag: option for option in OPTIONS}
    assert arguments[0] == "serve"
    flags: dict[str, str | None] = {}
    models = []
    for argument in arguments[1:]:
        if argument.startswith("--"):
            flag, equals, value = argument[2:].partition("=")
            assert equals, f"{argument}: a flag and its value are one argument here"
            assert flags.setdefault(options[flag].flag, value) == value, f"--{flag} is given twice"
        else:
            models.append(argument)
    return load_config(models, flags, {}, None)
