"""Instance groups: how many instances a model has, and on which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tensorferry.server.config.option_groups.devices import MOST_INSTANCES
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.devices import AvailableDevices, gpu_indices


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """The device of each instance of a group, and the group in the completed configuration."""

    devices: tuple[str, ...]
    message: ModelInstanceGroup


def instance_groups(
    given: ModelConfig | None, name: str, machine: AvailableDevices, instances: int = 1
) -> Sequence[InstanceGroup]:
    """Return the groups of a configuration; without any, this number of instances on each of the server's devices.

    StartError if a group cannot run on this machine.
    """
    groups = [
        _group(group, f"{name}_{index}", name, machine)
        for index, group in enumerate(given.instance_group if given is not None else ())
    ]
    if not groups:
        groups = [_group(_default(machine, instances), name, name, machine)]
    number = sum(len(group.devices) for group in groups)
    if not number:
        raise StartError(
            f"every instance group of model {name!r} is passive, so no instance would serve it; remove 'passive' from one"
        )
    if number > MOST_INSTANCES:
        raise _too_many(name, number)
    return groups


def _too_many(model: str, number: int) -> StartError:
    return StartError(
        f"model {model!r} asks for {number} instances, each with its own copy of the weights; the limit is "
        f"{MOST_INSTANCES}: lower 'count' of its instance_group, or --instances"
    )


def _default(machine: AvailableDevices, instances: int) -> ModelInstanceGroup:
    if machine.device == "cpu":
        return ModelInstanceGroup(kind=ModelInstanceGroup.KIND_CPU, count=instances)
    return ModelInstanceGroup(
        kind=ModelInstanceGroup.KIND_GPU, count=instances, gpus=gpu_indices(machine.device)
    )


def _group(
    given: ModelInstanceGroup, default_name: str, model: str, machine: AvailableDevices
) -> InstanceGroup:
    group = ModelInstanceGroup()
    group.CopyFrom(given)
    group.name = group.name or default_name
    group.count = max(1, group.count)
    group.kind = _kind(group, machine)
    gpus: Sequence[int] = ()
    if group.kind == ModelInstanceGroup.KIND_GPU:
        gpus = _gpus(group, model, machine)
    elif given.gpus and given.kind != ModelInstanceGroup.KIND_AUTO:
        raise StartError(
            f"instance group {group.name} of model {model} has kind {ModelInstanceGroup.Kind.Name(given.kind)} but specifies one or more GPUs: "
            "leave out 'gpus', or say KIND_GPU"
        )
    del group.gpus[:]
    group.gpus.extend(gpus)
    names = [f"cuda:{gpu}" for gpu in gpus] or ["cpu"]
    if not group.passive and len(names) * group.count > MOST_INSTANCES:
        # Checked before the list is made, because a client may request two thousand million instances.
        raise _too_many(model, len(names) * group.count)
    devices = () if group.passive else tuple(name for name in names for _ in range(group.count))
    return InstanceGroup(devices, group)


def _kind(group: ModelInstanceGroup, machine: AvailableDevices) -> ModelInstanceGroup.Kind:
    if group.kind != ModelInstanceGroup.KIND_AUTO:
        return group.kind
    if machine.device == "cpu" or not set(group.gpus) <= set(machine.gpus):
        return ModelInstanceGroup.KIND_CPU
    return ModelInstanceGroup.KIND_GPU


def _gpus(group: ModelInstanceGroup, model: str, machine: AvailableDevices) -> Sequence[int]:
    if not machine.gpus:
        raise StartError(
            f"instance group {group.name} of model {model} has kind KIND_GPU but no GPUs are available: "
            f"{machine.why_no_gpu}; say KIND_CPU, or KIND_AUTO to fall back by itself"
        )
    for gpu in group.gpus:
        if gpu not in machine.gpus:
            raise StartError(
                f"instance group {group.name} of model {model} specifies invalid or unsupported gpu id {gpu}; "
                f"this server may use: {', '.join(map(str, machine.gpus))}"
            )
    return tuple(group.gpus) or machine.gpus
