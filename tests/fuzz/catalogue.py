"""All targets that are fuzzed within one process, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fuzz.target import Target
from fuzz.targets.client import ClientTarget
from fuzz.targets.codec import TensorsTarget
from fuzz.targets.configs import ConfigTarget, FilesTarget, RepositoryTarget
from fuzz.targets.http import HttpTarget
from fuzz.targets.infer import InferTarget
from fuzz.targets.methods import MemoryTarget, SettingsTarget
from fuzz.targets.stream import StreamTarget

# Kept inputs by target: `make test` runs all of them, and `make fuzz` begins with them.
KEPT = Path(__file__).parent / "corpus"

TARGETS: Mapping[str, Callable[[Path], Target]] = {
    target.name: target
    for target in (
        InferTarget, StreamTarget, TensorsTarget, MemoryTarget, SettingsTarget, ConfigTarget, FilesTarget,
        RepositoryTarget, ClientTarget, HttpTarget,
    )
}  # fmt: skip
