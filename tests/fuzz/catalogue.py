"""All that is fuzzed within one process, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fuzz.client import ClientTarget
from fuzz.codec import TensorsTarget
from fuzz.configs import ConfigTarget, FilesTarget, RepositoryTarget
from fuzz.infer import InferTarget
from fuzz.methods import MemoryTarget, SettingsTarget
from fuzz.stream import StreamTarget
from fuzz.target import Target

# Inputs worth keeping, by target: `make test` runs all of them, and `make fuzz` begins with them.
KEPT = Path(__file__).parent / "corpus"

TARGETS: Mapping[str, Callable[[Path], Target]] = {
    target.name: target
    for target in (
        InferTarget,
        StreamTarget,
        TensorsTarget,
        MemoryTarget,
        SettingsTarget,
        ConfigTarget,
        FilesTarget,
        RepositoryTarget,
        ClientTarget,
    )
}
