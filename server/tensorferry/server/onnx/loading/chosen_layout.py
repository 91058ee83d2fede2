"""The layout of the cores that `--instances auto` has chosen for a model file, in the cache of checks."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.onnx.measuring.core_layouts import Layout, layouts_of
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.system.cores import usable_cores

_KIND = "core-layout"


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout of a model file on this machine's cores. Empty `layouts`: there is nothing to choose."""

    cache: CheckCache
    layouts: tuple[Layout, ...]

    @property
    def open(self) -> bool:
        """Whether a layout is to be chosen."""
        return bool(self.layouts) and self.get() is None

    def get(self) -> Layout | None:
        """Return the layout that was kept for these cores; None if none was."""
        found = self.cache.get(_KIND, self.layouts) if self.layouts else None
        return next((each for each in self.layouts if each.sessions == found), None)

    def keep(self, layout: Layout) -> None:
        """Keep the layout for later loads of this file."""
        self.cache.put(_KIND, self.layouts, layout.sessions)


def layouts_to_choose(
    options: ServerConfig, config: ModelConfig, devices: list[str], ort_options: OrtOptions
) -> tuple[Layout, ...]:
    """Return the layouts that `--instances auto` chooses from; none if the operator has chosen, or on GPUs."""
    chosen = options.instances is not None or config.instance_group or ort_options.intra_op_threads
    return () if chosen or devices != ["cpu"] else layouts_of(usable_cores())
