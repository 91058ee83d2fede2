"""All that is fuzzed within one process, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fuzz.client import ClientTarget
from fuzz.codec import TensorsTarget
from fuzz.infer import InferTarget
from fuzz.methods import MemoryTarget, SettingsTarget
from fuzz.stream import StreamTarget
from fuzz.target import Target

TARGETS: Mapping[str, Callable[[Path], Target]] = {
    target.name: target
    for target in (
        InferTarget,
        StreamTarget,
        TensorsTarget,
        MemoryTarget,
        SettingsTarget,
        ClientTarget,
    )
}
