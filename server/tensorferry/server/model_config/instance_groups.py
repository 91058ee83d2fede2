"""Instances: how many of a model there are, and on which devices they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.devices import AvailableDevices, gpu_indices

# Each holds the model's weights of its own.
_MOST = 64


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """One group: the device of each of its instances, and how the completed configuration describes it."""

    devices: tuple[str, ...]
    message: ModelInstanceGroup


def instance_groups(
    given: ModelConfig | None, name: str, machine: AvailableDevices
) -> Sequence[InstanceGroup]:
    """The groups that a configuration asks for; without any, one instance on each of the server's devices.

    StartError when a group cannot run on this machine.
    """
    groups = [
        _group(group, f"{name}_{index}", name, machine)
        for index, group in enumerate(given.instance_group if given is not None else ())
    ]
    if not groups:
        groups = [_group(_default(machine), name, name, machine)]
    number = sum(len(group.devices) for group in groups)
    if not number:
        raise StartError(
            f"every instance group of model {name!r} is passive, so nothing would serve it; leave out 'passive' of one"
        )
    if number > _MOST:
        raise _too_many(name, number)
    return groups


def _too_many(model: str, number: int) -> StartError:
    return StartError(
        f"instance_group of model {model!r} asks for {number} instances, each with weights of its own; "
        f"at most {_MOST} are made: lower 'count'"
    )


def _default(machine: AvailableDevices) -> ModelInstanceGroup:
    if machine.device == "cpu":
        return ModelInstanceGroup(kind=ModelInstanceGroup.KIND_CPU)
    return ModelInstanceGroup(kind=ModelInstanceGroup.KIND_GPU, gpus=gpu_indices(machine.device))


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
            f"instance group {group.name} of model {model} has kind {_name(given)} but specifies one or more GPUs: "
            "leave out 'gpus', or say KIND_GPU"
        )
    del group.gpus[:]
    group.gpus.extend(gpus)
    places = [f"cuda:{gpu}" for gpu in gpus] or ["cpu"]
    if not group.passive and len(places) * group.count > _MOST:
        # Before they are listed: a client may ask for two thousand million.
        raise _too_many(model, len(places) * group.count)
    devices = () if group.passive else tuple(place for place in places for _ in range(group.count))
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


def _name(group: ModelInstanceGroup) -> str:
    return ModelInstanceGroup.Kind.Name(group.kind)
