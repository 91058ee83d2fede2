"""What this server makes of each field of a model's configuration: used, passed on, warned of, or refused.

Every field has its rule, so none is ever ignored in silence. A rule of a message holds for all in it. The
same table stands, for people, in docs/reference/model_config.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.model_config.pbtxt import BACKEND, PLATFORM


class Treatment(enum.Enum):
    """What becomes of a field that is set."""

    USED = "used"
    PASSED_ON = "passed on"
    WARNED = "warned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """`said` is for the log or the error: what is done instead, or what to change.

    With `when`, the rule holds for a value only if that is true of it.
    """

    treatment: Treatment
    said: str = ""
    when: Callable[[Any], bool] | None = None


_USED = Rule(Treatment.USED)
# Says something of the model to clients, and changes nothing here.
_PASSED_ON = Rule(Treatment.PASSED_ON)


def _warned(said: str, when: Callable[[Any], bool] | None = None) -> Rule:
    return Rule(Treatment.WARNED, said, when)


def _refused(said: str) -> Rule:
    return Rule(Treatment.REFUSED, said)


_TENSORRT = "it is of TensorRT models alone"
_CUDA = (
    "it changes nothing: options of the CUDA provider belong into execution_accelerators "
    "{ gpu_execution_accelerator { name: 'cuda' } }"
)
_PINNED = _warned(
    "it changes nothing: tensors for a GPU go through pinned memory", when=lambda buffer: not buffer.enable
)

RULES: Mapping[str, Rule] = {
    "name": _USED,
    "platform": _USED,
    "backend": _USED,
    "runtime": _warned("it changes nothing: the model runs on the ONNX Runtime that is installed"),
    "version_policy": _USED,
    "max_batch_size": _USED,
    "input.name": _USED,
    "input.data_type": _USED,
    "input.format": _PASSED_ON,
    "input.dims": _USED,
    "input.reshape": _USED,
    "input.is_shape_tensor": _USED,
    "input.allow_ragged_batch": _refused(
        "rows of different lengths are not joined end to end here; leave it out: requests of each shape then share "
        "batches, and with --pad-lengths those of different lengths do"
    ),
    "input.optional": _USED,
    "input.is_non_linear_format_io": _refused(f"{_TENSORRT}; leave it out"),
    "output.name": _USED,
    "output.data_type": _USED,
    "output.dims": _USED,
    "output.reshape": _USED,
    "output.label_filename": _USED,
    "output.is_shape_tensor": _refused(
        "shape tensors are only supported for TensorRT platform; leave it out"
    ),
    "output.is_non_linear_format_io": _refused(f"{_TENSORRT}; leave it out"),
    "batch_input": _refused(
        "the model would get an input that this server does not make; export it without, or leave it out"
    ),
    "batch_output": _refused("outputs are cut up by rows alone; export the model so, and leave it out"),
    "optimization.graph.level": _USED,
    "optimization.priority": _USED,
    "optimization.cuda.graphs": _USED,
    "optimization.cuda.graph_spec.batch_size": _USED,
    "optimization.cuda.graph_spec.input": _USED,
    "optimization.cuda.graph_spec.graph_lower_bound": _warned(
        "it changes nothing: a batch is padded up to the next larger graph, whatever its size"
    ),
    "optimization.cuda.busy_wait_events": _warned(_CUDA),
    "optimization.cuda.output_copy_stream": _warned(
        "it changes nothing: outputs are copied on a stream of their own"
    ),
    "optimization.execution_accelerators": _USED,
    "optimization.input_pinned_memory": _PINNED,
    "optimization.output_pinned_memory": _PINNED,
    "optimization.gather_kernel_buffer_threshold": _warned("it changes nothing: rows are joined on the host"),
    "optimization.eager_batching": _warned(
        "it changes nothing: the next batch is joined just before the device is free"
    ),
    "dynamic_batching.preferred_batch_size": _USED,
    "dynamic_batching.max_queue_delay_microseconds": _USED,
    "dynamic_batching.preserve_ordering": _warned(
        "answers within a stream are in the order of its requests anyway; those of other calls leave when they are "
        "ready"
    ),
    "dynamic_batching.priority_levels": _USED,
    "dynamic_batching.default_priority_level": _USED,
    "dynamic_batching.default_queue_policy": _USED,
    "dynamic_batching.priority_queue_policy": _USED,
    "sequence_batching": _refused(
        "requests do not belong to sequences here, and the model would see others' states; leave it out if the model "
        "keeps none"
    ),
    "ensemble_scheduling": _refused(
        "models are not put together here; join their ONNX files into one, or have the client call one after another"
    ),
    "instance_group.name": _USED,
    "instance_group.kind": _USED,
    "instance_group.count": _USED,
    "instance_group.gpus": _USED,
    "instance_group.passive": _USED,
    "instance_group.rate_limiter": _warned("each instance takes the next batch as soon as it is free"),
    "instance_group.secondary_devices": _warned(f"{_TENSORRT}; the instances run on 'kind' and 'gpus'"),
    "instance_group.profile": _refused(f"{_TENSORRT}; leave it out"),
    "instance_group.host_policy": _warned("threads and memory are not bound to a NUMA node here"),
    "default_model_filename": _USED,
    "cc_model_filenames": _warned("every GPU gets default_model_filename, whatever its compute capability"),
    "metric_tags": _warned("the model's metrics have no labels of their own"),
    "parameters": _USED,
    "model_warmup": _USED,
    "model_operations.op_library_filename": _refused(
        "libraries of custom operators are not loaded; export the model with ONNX's own operators"
    ),
    "model_transaction_policy.decoupled": _refused(
        "every request has one response here; leave it out if that holds for this model"
    ),
    "model_repository_agents": _refused(
        "no agent works on the model's files here, a check or a decryption would not happen; leave it out"
    ),
    "response_cache.enable": _warned("no answer is kept: each request is computed"),
    "model_metrics": _warned("histograms have the server's own buckets"),
}


def check_fields(config: ModelConfig, model: str) -> list[str]:
    """What is to be said in the log of fields that are not used; ModelConfigError for one that is refused.

    `config` is as it was given.
    """
    _check_backend(config, model)
    _check_enums(config, model)
    warnings = []
    for path, value in fields_that_are_set(config):
        rule = RULES[path]
        if rule.when is not None and not rule.when(value):
            continue
        if rule.treatment is Treatment.REFUSED:
            raise ModelConfigError(f"the configuration of model {model!r} has {path}: {rule.said}")
        if rule.treatment is Treatment.WARNED:
            warnings.append(f"the configuration of model {model!r} has {path}: {rule.said}")
    return list(dict.fromkeys(warnings))


def _check_backend(config: ModelConfig, model: str) -> None:
    for field, value, ours in (
        ("platform", config.platform, PLATFORM),
        ("backend", config.backend, BACKEND),
    ):
        if value not in ("", ours):
            raise ModelConfigError(
                f"unexpected {field} type {value!r} for {model}: this server runs ONNX models alone, whose {field} is "
                f"{ours!r}"
            )


def _check_enums(message: Message, model: str, prefix: str = "") -> None:
    """Holds every value that has a name to those that there are: protobuf takes any number for one."""
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
    """The fields of a message that are set and have a rule, by the rule's name, each with its value.

    A field that repeats comes once for each of its values, if the rules are of what is in it.
    """
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in RULES:
            yield path, value
        else:
            repeats = not isinstance(value, Message)
            for each in value if repeats else (value,):
                yield from fields_that_are_set(each, path + ".")
