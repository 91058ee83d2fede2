"""Instance groups give the number of instances and their devices, and must fit the machine."""

from __future__ import annotations

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.instance_groups import instance_groups
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.runtime.devices import AvailableDevices

CPU = AvailableDevices("cpu", (), "there is no CUDA device 0 (the driver reports 0)")
GPU = AvailableDevices("cuda:0", (0, 1))
ONE = AvailableDevices("cuda:1", (1,))
SEVERAL = AvailableDevices("cuda:2,0", (2, 0))


def devices(text: str | None, machine: AvailableDevices, instances: int = 1) -> list[str]:
    config = parse_config(text, "test") if text is not None else None
    return [name for group in instance_groups(config, "m", machine, instances) for name in group.devices]


@pytest.mark.parametrize(
    ("groups", "on_cpu", "on_gpus"),
    [
        (None, ["cpu"], ["cuda:0"]),
        ("instance_group { }", ["cpu"], ["cuda:0", "cuda:1"]),
        ("instance_group { kind: KIND_AUTO gpus: 1 }", ["cpu"], ["cuda:1"]),
        ("instance_group { kind: KIND_AUTO gpus: [ 1, 2 ] count: 2 }", ["cpu"] * 2, ["cpu"] * 2),
        ("instance_group { passive: true } instance_group { kind: KIND_CPU }", ["cpu"], ["cpu"]),
    ],
)
def test_the_devices_of_instances(groups: str | None, on_cpu: list[str], on_gpus: list[str]) -> None:
    assert devices(groups, CPU) == on_cpu
    assert devices(groups, GPU) == on_gpus


def test_the_option_instances_counts_those_on_each_device_unless_the_configuration_has_groups() -> None:
    assert devices(None, CPU, 2) == devices("", CPU, 2) == ["cpu", "cpu"]
    assert devices(None, SEVERAL, 2) == ["cuda:2", "cuda:2", "cuda:0", "cuda:0"]
    assert devices("instance_group { }", CPU, 2) == ["cpu"]


def test_the_default_is_one_instance_on_each_gpu() -> None:
    assert devices(None, SEVERAL) == devices("instance_group { }", SEVERAL) == ["cuda:2", "cuda:0"]
    assert devices("instance_group { kind: KIND_GPU gpus: 0 }", SEVERAL) == ["cuda:0"]
    assert devices("instance_group { kind: KIND_GPU }", ONE) == ["cuda:1"]
    with pytest.raises(StartError, match="unsupported gpu id 1; this server may use: 2, 0"):
        devices("instance_group { gpus: 1 kind: KIND_GPU }", SEVERAL)


@pytest.mark.parametrize(
    ("groups", "machine", "message"),
    [
        (
            "instance_group { kind: KIND_GPU }",
            CPU,
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: there is no CUDA device 0 (the "
            "driver reports 0); say KIND_CPU, or KIND_AUTO to fall back by itself",
        ),
        (
            'instance_group { name: "g" kind: KIND_GPU gpus: 2 }',
            GPU,
            "instance group g of model m specifies invalid or unsupported gpu id 2; this server may use: 0, 1",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            GPU,
            "has kind KIND_CPU but specifies one or more GPUs",
        ),
        ("instance_group { passive: true }", CPU, "every instance group of model 'm' is passive"),
        (
            "instance_group { count: 65 }",
            CPU,
            "asks for 65 instances, each with its own copy of the weights; the limit is 64",
        ),
    ],
)
def test_impossible_groups_are_refused(groups: str, machine: AvailableDevices, message: str) -> None:
    with pytest.raises(StartError) as caught:
        devices(groups, machine)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "machine", "completed"),
    [
        (None, SEVERAL, 'name: "m" kind: KIND_GPU count: 1 gpus: [ 2, 0 ]'),
        ("{ gpus: [ 0, 7 ] }", GPU, 'name: "m_0" kind: KIND_CPU count: 1'),
    ],
)
def test_completed_groups_describe_what_is_used(
    given: str | None, machine: AvailableDevices, completed: str
) -> None:
    config = parse_config(f"instance_group {given}", "test") if given else None
    (group,) = instance_groups(config, "m", machine)
    assert group.message == parse_config(f"instance_group {{ {completed} }}", "").instance_group[0]
