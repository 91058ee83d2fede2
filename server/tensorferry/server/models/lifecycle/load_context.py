"""What the models of a server have in common when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tensorferry.batcher import BatchStartCallback, ResponseBurstHook
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import NotFoundError
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.python.steps.stage_function import CallsOfBatch, no_calls
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import Watchdog


class FindModel(Protocol):
    """Returns a model by name and version, "" for the latest. NotFoundError or NotReadyError."""

    def __call__(self, name: str, version: str = "", /) -> Model:
        """Return the model."""


def _no_model(name: str, version: str = "", /) -> Model:
    raise NotFoundError(f"there is no other model {name!r}")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The server's options and objects that loading needs.

    `devices` has the device that was chosen for each value of --device; the CPU for others. Without a `watchdog`, hanging
    runs are not detected, and deadlines do not end streams of answers. `on_health_change` and `on_device_lost` are `changed`
    and `lost` of `InstanceHealth`, `response_hook` and `batch_started` as in `Batcher`. `calls` makes what functions call other
    models through. `get_model` and `step_model` are as `get` and `step_model` of `ModelRegistry`. `new_budget` is as in
    `prepare_model`.
    """

    config: ServerConfig
    devices: Mapping[str, str] = field(default_factory=dict)
    response_hook: ResponseBurstHook | None = None
    watchdog: Watchdog | None = None
    on_health_change: Callable[[InstanceHealth], None] = lambda health: None
    on_device_lost: Callable[[str], None] = lambda reason: None
    batch_started: BatchStartCallback | None = None
    calls: CallsOfBatch = no_calls
    get_model: FindModel = _no_model
    step_model: FindModel = _no_model
    new_budget: Callable[[], LoadBudget] = LoadBudget
