"""Support for each field of a model's configuration: used, passed on, warned about or refused.

Every field has a rule, so none is ignored silently. The rule of a message applies to all its fields.
docs/reference/model_config.md has the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt import ensembles
from tensorferry.server.models.config_pbtxt.pbtxt import BACKEND, PLATFORM, PYTHON


class ModelKind(enum.Enum):
    """What a model is: an ONNX file, a Python file, one with Triton's class, or steps that other models run."""

    ONNX = "ONNX"
    PYTHON = "Python"
    TRITON_PYTHON = "TritonPythonModel"
    ENSEMBLE = "ensemble"


class Treatment(enum.Enum):
    """Treatment of a field that is set."""

    USED = "used"
    PASSED_ON = "passed on"
    WARNED = "warned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule of a field. `message` completes the log line or the error: the effect, or what to change.

    If `when` is given, the rule applies only to values for which it returns true.
    """

    treatment: Treatment
    message: str = ""
    when: Callable[[Any], bool] | None = None


_USED = FieldRule(Treatment.USED)
# Describes the model to clients, and has no effect in the server.
_PASSED_ON = FieldRule(Treatment.PASSED_ON)


def _warned(message: str, when: Callable[[Any], bool] | None = None) -> FieldRule:
    return FieldRule(Treatment.WARNED, message, when)


def _refused(message: str) -> FieldRule:
    return FieldRule(Treatment.REFUSED, message)


_TENSORRT = "it is for TensorRT models only"
_CUDA = (
    "it has no effect: put options of the CUDA provider into execution_accelerators "
    "{ gpu_execution_accelerator { name: 'cuda' } }"
)
_PINNED = _warned(
    "it has no effect: tensors for a GPU always use pinned memory", when=lambda buffer: not buffer.enable
)

_NO_SLOTS = _warned("it has no effect: a sequence takes room in a batch only while its request runs")
_STATE_BUFFERS = _warned("it has no effect: each state is copied")

_USED_FIELDS = """
name platform backend version_policy max_batch_size ensemble_scheduling default_model_filename parameters
model_warmup model_operations.op_library_filename response_cache.enable
input.name input.data_type input.dims input.reshape input.is_shape_tensor input.optional
output.name output.data_type output.dims output.reshape output.label_filename
optimization.graph.level optimization.priority optimization.cuda.graphs
optimization.cuda.graph_spec.batch_size optimization.cuda.graph_spec.input
optimization.execution_accelerators
dynamic_batching.preferred_batch_size dynamic_batching.max_queue_delay_microseconds
dynamic_batching.priority_levels dynamic_batching.default_priority_level
dynamic_batching.default_queue_policy dynamic_batching.priority_queue_policy
sequence_batching.max_sequence_idle_microseconds sequence_batching.control_input
sequence_batching.state.input_name sequence_batching.state.output_name sequence_batching.state.data_type
sequence_batching.state.dims sequence_batching.state.initial_state
sequence_batching.direct.max_queue_delay_microseconds sequence_batching.oldest.preferred_batch_size
sequence_batching.oldest.max_queue_delay_microseconds
instance_group.name instance_group.kind instance_group.count instance_group.gpus instance_group.passive
"""

RULES: Mapping[str, FieldRule] = {
    **dict.fromkeys(_USED_FIELDS.split(), _USED),
    "runtime": _warned("it has no effect: the model runs on the installed ONNX Runtime"),
    "input.format": _PASSED_ON,
    "input.allow_ragged_batch": _refused(
        "this server does not concatenate rows of different lengths; leave it out: requests of one shape share "
        "batches, and with --pad-lengths also those of different lengths"
    ),
    "input.is_non_linear_format_io": _refused(f"{_TENSORRT}; leave it out"),
    "output.is_shape_tensor": _refused(
        "shape tensors are only supported for TensorRT platform; leave it out"
    ),
    "output.is_non_linear_format_io": _refused(f"{_TENSORRT}; leave it out"),
    "batch_input": _refused(
        "this server does not generate such inputs; export the model without it, or leave it out"
    ),
    "batch_output": _refused(
        "this server splits outputs by rows only; export the model so, and leave it out"
    ),
    "optimization.cuda.graph_spec.graph_lower_bound": _warned(
        "it has no effect: a batch is padded to the next larger graph, whatever its size"
    ),
    "optimization.cuda.busy_wait_events": _warned(_CUDA),
    "optimization.cuda.output_copy_stream": _warned(
        "it has no effect: outputs are always copied on a separate stream"
    ),
    "optimization.input_pinned_memory": _PINNED,
    "optimization.output_pinned_memory": _PINNED,
    "optimization.gather_kernel_buffer_threshold": _warned("it has no effect: rows are joined on the host"),
    "optimization.eager_batching": _warned(
        "it has no effect: the next batch is joined just before the device is free"
    ),
    "dynamic_batching.preserve_ordering": _warned(
        "it has no effect: responses of a stream always keep the order of its requests; other responses are sent when "
        "they are ready"
    ),
    "sequence_batching.state.use_same_buffer_for_input_output": _STATE_BUFFERS,
    "sequence_batching.state.use_growable_memory": _STATE_BUFFERS,
    "sequence_batching.direct.minimum_slot_utilization": _NO_SLOTS,
    "sequence_batching.oldest.max_candidate_sequences": _NO_SLOTS,
    "sequence_batching.oldest.preserve_ordering": _warned(
        "it has no effect: requests of a sequence are answered in their order, those of others when they are ready"
    ),
    "sequence_batching.iterative_sequence": _refused(
        "this server runs each request once; leave it out if the model does not ask to be run again"
    ),
    "instance_group.rate_limiter": _warned(
        "it has no effect: each instance takes the next batch as soon as it is free"
    ),
    "instance_group.secondary_devices": _warned(
        f"{_TENSORRT} and has no effect; 'kind' and 'gpus' give the devices of the instances"
    ),
    "instance_group.profile": _refused(f"{_TENSORRT}; leave it out"),
    "instance_group.host_policy": _warned(
        "it has no effect: this server does not bind threads or memory to NUMA nodes"
    ),
    "cc_model_filenames": _warned(
        "it has no effect: every GPU gets default_model_filename, whatever its compute capability"
    ),
    "metric_tags": _warned("it has no effect: a model's metrics have no additional labels"),
    "model_transaction_policy.decoupled": _refused(
        "only Python functions that are declared with streams=True have several responses to a request; leave it out if the "
        "model has one"
    ),
    "model_repository_agents": _refused(
        "this server has no agents, so a check or decryption of the files would not happen; leave it out"
    ),
    "model_metrics": _warned("it has no effect: histograms have the server's buckets"),
}


# Fields that have an effect on ONNX models only, and why they have none on others.
_IN_PYTHON = _warned("it has no effect on a Python model; its code decides that")
_IN_ENSEMBLE = _warned("it has no effect on an ensemble; give it to the models of its steps")
_OF_PYTHON = {
    path: _IN_PYTHON for path in RULES if path.startswith(("optimization.", "parameters", "model_"))
} | {"model_transaction_policy.decoupled": _USED}
_OF_KIND: Mapping[ModelKind, Mapping[str, FieldRule]] = {
    ModelKind.ONNX: {},
    ModelKind.PYTHON: _OF_PYTHON,
    ModelKind.TRITON_PYTHON: {**_OF_PYTHON, "parameters": _USED},
    ModelKind.ENSEMBLE: {
        path: _IN_ENSEMBLE
        for path in RULES
        if path.startswith(("parameters", "model_op", "default_model_filename"))
    },
}


def check_fields(config: ModelConfig, model: str, kind: ModelKind = ModelKind.ONNX) -> list[str]:
    """Return warnings about fields that have no effect; raise ModelConfigError for a refused field.

    `config` is the configuration before completion.
    """
    _check_backend(config, model, kind)
    _check_enums(config, model)
    if kind is not ModelKind.ONNX and config.HasField("sequence_batching"):
        raise ModelConfigError(
            f"the configuration of model {model!r} has sequence_batching: this server keeps states of ONNX models only; leave it out"
        )
    warnings = []
    for path, value in fields_that_are_set(config):
        rule = RULES[path]
        own = _OF_KIND[kind].get(path, rule)
        if rule.treatment is not Treatment.REFUSED or own.treatment is Treatment.USED:
            rule = own
        if rule.when is not None and not rule.when(value):
            continue
        if rule.treatment is Treatment.REFUSED:
            raise ModelConfigError(f"the configuration of model {model!r} has {path}: {rule.message}")
        if rule.treatment is Treatment.WARNED:
            warnings.append(f"the configuration of model {model!r} has {path}: {rule.message}")
    return list(dict.fromkeys(warnings))


def _check_backend(config: ModelConfig, model: str, kind: ModelKind) -> None:
    allowed = {
        ModelKind.ONNX: (PLATFORM, BACKEND),
        ModelKind.PYTHON: (PYTHON, PYTHON),
        ModelKind.TRITON_PYTHON: (PYTHON, PYTHON),
        ModelKind.ENSEMBLE: (ensembles.PLATFORM, ""),
    }[kind]
    for field, value, expected in zip(
        ("platform", "backend"), (config.platform, config.backend), allowed, strict=True
    ):
        if value in ("", expected):
            continue
        advice = "leave it out"
        if kind is ModelKind.ONNX:
            advice = "this server runs ONNX models, Python models (model.py) and ensembles"
        raise ModelConfigError(
            f"unexpected {field} type {value!r} for {model}: the {field} of {kind.value} models is {expected!r}; {advice}"
        )


def _check_enums(message: Message, model: str, prefix: str = "") -> None:
    """Check that enum values are defined, because protobuf accepts any number."""
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if isinstance(value, Mapping):
            values: Iterable[Any] = value.values()
        else:
            values = (value,) if isinstance(value, (Message, int, float, str, bytes)) else value
        for each in values:
            if isinstance(each, Message):
                _check_enums(each, model, path + ".")
            elif descriptor.enum_type is not None and each not in descriptor.enum_type.values_by_number:
                names = ", ".join(known.name for known in descriptor.enum_type.values)
                raise ModelConfigError(
                    f"the configuration of model {model!r} has {path}: {each}; it must be one of {names}"
                )


def fields_that_are_set(message: Message, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of the rule and the value of each field that is set.

    A repeated message without its own rule is visited once for each value.
    """
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in RULES:
            yield path, value
        else:
            repeats = not isinstance(value, Message)
            for each in value if repeats else (value,):
                yield from fields_that_are_set(each, path + ".")
