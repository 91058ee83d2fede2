"""config.pbtxt of a Python model: what it decides in place of the declaration, and in place of the server's options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import InstanceGroup, instance_groups
from tensorferry.server.models.config_pbtxt.io_mapping import io_mapping_of
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision, is_complete
from tensorferry.server.models.config_pbtxt.settings import check_dynamic_batching
from tensorferry.server.models.config_pbtxt.supported_fields import ModelKind, check_fields
from tensorferry.server.runtime.devices import AvailableDevices
from tensorferry.server.signature import Signature
from tensorferry.serving import FunctionModel

_log = logging.getLogger("tensorferry.server")

_NO_DEVICES = AvailableDevices(
    why_no_gpu="this server runs functions on the CPU, and their code chooses other devices"
)
# The fields that a configuration may have if the declaration says all else.
_OF_EVERY_MODEL = ("name", "version_policy")


def configured(
    declared: FunctionModel, given: ModelConfig, name: str
) -> tuple[FunctionModel, Sequence[InstanceGroup]]:
    """Return a function as its configuration changes it, and its instance groups, if the configuration has any.

    ModelConfigError if both contradict each other.
    """
    kind = ModelKind.TRITON_PYTHON if declared.takes_requests else ModelKind.PYTHON
    for warning in check_fields(given, name, kind):
        _log.warning("%s", warning)
    declared = replace(declared, max_batch_size=_max_batch_size(declared, given, name))
    check_dynamic_batching(given)
    if given.model_transaction_policy.decoupled and not declared.streams:
        raise ModelConfigError(
            f"the configuration of model {name!r} has model_transaction_policy {{ decoupled: true }}, but its function returns "
            "one answer; declare it with streams=True, or leave that out"
        )
    if not given.instance_group:
        return declared, ()
    groups = instance_groups(given, name, _NO_DEVICES)
    count = sum(len(group.devices) for group in groups)
    if declared.processes:
        return replace(declared, processes=count), groups
    return replace(declared, workers=count), groups


def _max_batch_size(declared: FunctionModel, given: ModelConfig, name: str) -> int | None:
    most = given.max_batch_size
    where = f"the configuration of model {name!r} has max_batch_size: {most}"
    if most < 0:
        raise ModelConfigError(f"{where}; it must be at least 0")
    if not most:
        if is_complete(given) and declared.max_batch_size != 0:
            raise ModelConfigError(
                f"{where}, so its requests have no axis of rows, but the function declares one; give it a max_batch_size, or "
                "declare @model(max_batch_size=0)"
            )
        return declared.max_batch_size
    if declared.max_batch_size == 0:
        raise ModelConfigError(
            f"{where}, but the function declares max_batch_size=0: it has no axis of rows; leave it out"
        )
    if not declared.batched:
        if most > 1:
            raise ModelConfigError(
                f"{where}, but the function takes one row at a time (batched=False); leave it out"
            )
        return None
    if declared.max_batch_size is not None and most > declared.max_batch_size:
        raise ModelConfigError(
            f"{where}, but the function declares at most {declared.max_batch_size}; lower it, or raise that"
        )
    return most


def configured_decision(decision: BatchingDecision, given: ModelConfig) -> BatchingDecision:
    """Return how a function is batched. As for ONNX models, a configuration with inputs and outputs is taken at its word."""
    if not is_complete(given) or given.HasField("dynamic_batching") or not decision.max_batch_size:
        return decision
    return replace(
        decision, merges=False, description="each request runs alone (config.pbtxt has no dynamic_batching)"
    )


def check_tensors(completed: ModelConfig, given: ModelConfig, signature: Signature) -> None:
    """Check that the inputs and outputs in a configuration, if any, are the declared ones; ModelConfigError."""
    mapping = io_mapping_of(completed, signature)
    if mapping.inputs or mapping.outputs:
        raise ModelConfigError(
            f"the configuration of model {completed.name!r} has a reshape, which is for ONNX models; declare the shapes that "
            "clients see"
        )
    if len(mapping.signature.outputs) != len(signature.outputs):
        names = ", ".join(spec.name for spec in signature.outputs)
        raise ModelConfigError(
            f"the configuration of model {completed.name!r} lists {len(given.output)} outputs, but the function declares "
            f"{len(signature.outputs)}: {names}; list all, or none"
        )


def check_settings_are_declared(given: ModelConfig | None, name: str, what: str) -> None:
    """Check that a configuration has no settings, for a Python file that declares something else than a function."""
    for descriptor, _ in given.ListFields() if given is not None else ():
        if descriptor.name not in _OF_EVERY_MODEL:
            raise ModelConfigError(
                f"the configuration of model {name!r} has {descriptor.name}, but its Python file declares {what}: its settings "
                f"are in that file. Leave out all but {' and '.join(_OF_EVERY_MODEL)}"
            )
