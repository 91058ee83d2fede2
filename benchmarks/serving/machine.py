"""The machine and the versions that a result is valid for."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_OURS = ("tensorferry", "grpcio", "protobuf", "numpy", "onnxruntime")


def describe(cache: Path) -> dict[str, object]:
    """Return processor, memory, system, and the versions of the measured packages."""
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _OURS},
        "peers": _peers(cache / "peers"),
    }


def processor(said: str) -> str:
    """Return the model of the first processor."""
    for line in said.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _peers(folder: Path) -> dict[str, str]:
    """Return the packages that each peer was installed from."""
    return {file.stem: file.read_text().strip() for file in sorted(folder.glob("*.requirements"))}
