"""What the models of a server have in common when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tensorferry.batcher import BatchStartCallback, ResponseBurstHook
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.python.steps.stage_function import CallsOfBatch, no_calls
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The server's options and objects that loading needs.

    `devices` has the device that was chosen for each value of --device; the CPU for others. Without a `watchdog`, hanging
    runs are not detected, and deadlines do not end streams of answers. `on_health_change` and `on_device_lost` are `changed`
    and `lost` of `InstanceHealth`, `response_hook` and `batch_started` as in `Batcher`. `calls` makes what functions call other
    models through. `registry` has the models that steps name. `new_budget` is as in `prepare_model`.
    """

    config: ServerConfig
    devices: Mapping[str, str] = field(default_factory=dict)
    response_hook: ResponseBurstHook | None = None
    watchdog: Watchdog | None = None
    on_health_change: Callable[[InstanceHealth], None] = lambda health: None
    on_device_lost: Callable[[InstanceHealth, str], None] = lambda health, reason: None
    batch_started: BatchStartCallback | None = None
    calls: CallsOfBatch = no_calls
    registry: ModelRegistry = field(default_factory=ModelRegistry)
    new_budget: Callable[[], LoadBudget] = LoadBudget
