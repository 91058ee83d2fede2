"""The manifests as kustomize builds them, compared with their schemas."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.wire.programs import CLIENTS, needs

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHECK = Path(__file__).with_name("check_manifests.py")
KUSTOMIZE = CLIENTS / "kustomize"
MANIFEST_TOOLS = needs(KUSTOMIZE, CLIENTS / "manifests" / ".done", CLIENTS / "kserve" / ".done")

Document = Mapping[str, Any]


def checked(text: str, environment: str, *arguments: str) -> list[Document]:
    """Return the documents of a text, which must fit their schemas."""
    ended = subprocess.run(
        [CLIENTS / environment / "bin" / "python", CHECK, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert not result["errors"], "\n".join(result["errors"])
    return list(result["documents"])


def built(folder: Path) -> str:
    ended = subprocess.run([KUSTOMIZE, "build", folder], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]
