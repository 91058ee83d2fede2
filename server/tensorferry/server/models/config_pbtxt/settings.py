"""Settings by which a model is scheduled and run, from its completed configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.batcher import QueuePolicy
from tensorferry.protos.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import InstanceGroup
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision
from tensorferry.server.runtime.ort_options import OrtOptions

# Limited because forming a batch visits every level.
_MOST_LEVELS = 64


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Scheduling and execution settings of a model. Times are in seconds.

    `devices` has the device of each instance. Priority classes share rows by `priority_weights`; with
    `strict_priorities`, a class precedes all lower ones. `policies` has one entry per class, or none.
    """

    max_batch_size: int
    merges: bool
    max_queue_delay: float
    preferred_batch_sizes: tuple[int, ...]
    priority_weights: tuple[int, ...]
    strict_priorities: bool
    default_priority: int
    policies: tuple[QueuePolicy, ...]
    devices: tuple[str, ...]
    ort_options: OrtOptions


def settings_of(
    config: ModelConfig,
    batching: BatchingDecision,
    groups: Sequence[InstanceGroup],
    server_config: ServerConfig,
    ort_options: OrtOptions,
    *,
    generated: bool,
) -> ModelSettings:
    """Return the settings in a completed configuration; ModelConfigError names a value that is not allowed.

    `ort_options` are those of its sessions. `generated` says that dynamic_batching is not from the model's
    configuration but from the server's options.
    """
    dynamic = config.dynamic_batching
    check_dynamic_batching(config)
    levels = dynamic.priority_levels
    weights = (1,) * levels if levels else (1,)
    # As in Triton, the default level is ignored if there are no levels.
    default = dynamic.default_priority_level if levels else 0
    if generated:
        weights, default = server_config.priority_weights, server_config.default_priority
    preferred = tuple(dynamic.preferred_batch_size)
    return ModelSettings(
        max_batch_size=batching.max_batch_size,
        merges=batching.merges,
        max_queue_delay=dynamic.max_queue_delay_microseconds / 1e6 if batching.merges else 0.0,
        # A full batch is dispatched anyway.
        preferred_batch_sizes=() if preferred == (batching.max_batch_size,) else preferred,
        priority_weights=weights,
        strict_priorities=not generated and len(weights) > 1,
        default_priority=default,
        policies=_policies(dynamic),
        devices=tuple(device for group in groups for device in group.devices),
        ort_options=ort_options,
    )


def _policies(dynamic: ModelDynamicBatching) -> tuple[QueuePolicy, ...]:
    if not dynamic.HasField("default_queue_policy") and not dynamic.priority_queue_policy:
        return ()
    policies = dynamic.priority_queue_policy
    return tuple(
        _policy(policies.get(level, dynamic.default_queue_policy))
        for level in range(1, (dynamic.priority_levels or 1) + 1)
    )


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout=policy.default_timeout_microseconds / 1e6 or math.inf,
        overridable=policy.allow_timeout_override,
        delays=policy.timeout_action == ModelQueuePolicy.DELAY,
        max_requests=policy.max_queue_size,
    )


def check_dynamic_batching(config: ModelConfig) -> None:
    """Check dynamic_batching by Triton's rules; raise ModelConfigError."""
    dynamic, model = config.dynamic_batching, config.name
    for size in dynamic.preferred_batch_size:
        if size <= 0:
            raise ModelConfigError(
                f"dynamic batching preferred size must be positive for {model}, got {size}"
            )
        if size > config.max_batch_size:
            raise ModelConfigError(
                f"dynamic batching preferred size must be <= max batch size for {model}, got {size} and "
                f"{config.max_batch_size}"
            )
    levels = dynamic.priority_levels
    if levels > _MOST_LEVELS:
        raise ModelConfigError(
            f"dynamic_batching.priority_levels of {model} is {levels}; this server has at most {_MOST_LEVELS}"
        )
    if levels and not 1 <= dynamic.default_priority_level <= levels:
        raise ModelConfigError(
            f"default priority level must be in range [1, {levels}] for {model}, got {dynamic.default_priority_level}"
        )
    for level in dynamic.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            raise ModelConfigError(
                f"priority queue policy must have priority level in range [1, {levels}] for {model}, got {level}"
            )
    if dynamic.priority_queue_policy and not levels:
        raise ModelConfigError(
            f"dynamic_batching of {model} has priority_queue_policy for priority level "
            f"{', '.join(map(str, sorted(dynamic.priority_queue_policy)))}, but no priority_levels; add priority_levels, "
            "or put the policy into default_queue_policy"
        )
    if dynamic.preserve_ordering:
        if levels > 1:
            raise ModelConfigError(
                f"Only one priority level is allowed when 'preserve_ordering' is true for {model}, got {levels}"
            )
        for policy in (dynamic.default_queue_policy, *dynamic.priority_queue_policy.values()):
            if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
                raise ModelConfigError(
                    f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
                )
