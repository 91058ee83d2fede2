"""A model's config.pbtxt: read, and completed from what the ONNX file and the options say.

The completed configuration is what clients get from ModelConfig, and what `settings_of` reads: it says
what is really used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.model_config.instance_groups import InstanceGroup
from tensorferry.server.signature import Signature, TensorSpec

PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"

# The configuration names every datatype as the protocol does, but for this one.
_CONFIG_NAMES = {"BYTES": "STRING"}


@dataclass(frozen=True, slots=True)
class BatchingDecision:
    """How a model is batched: decided once it is known what the ONNX file allows.

    With a `max_batch_size` above 0, axis 0 counts rows; whether requests then share a batch is
    `merges`. `description` is for people, `verdict` for programs: proved, tested, trusted, refused or off.
    """

    max_batch_size: int
    merges: bool
    description: str
    verdict: str = "off"


def read_config(path: Path) -> ModelConfig:
    """The configuration in a config.pbtxt; ModelConfigError names the file, and the line where it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    return parse_config(text, str(path))


def parse_config(text: str, source: str) -> ModelConfig:
    """The configuration in a text; ModelConfigError names the source, and the line where it is wrong."""
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        # The message begins with the place, if there is one.
        reason = str(error).split(" : ", 1)[-1]
        line, column = error.GetLine(), error.GetColumn()
        place = f"line {line}, column {column}" if line is not None else "its text"
        raise ModelConfigError(
            f"{source}: {place}: {reason} (a text-format inference.ModelConfig is expected)"
        ) from None


def config_text(config: ModelConfig) -> str:
    """A configuration in text format, as a config.pbtxt has it."""
    return text_format.MessageToString(config)


def type_name(spec: TensorSpec) -> str:
    """What a configuration calls a tensor's datatype."""
    name = spec.datatype.name
    return f"TYPE_{_CONFIG_NAMES.get(name, name)}"


def is_complete(config: ModelConfig) -> bool:
    """Whether inputs and outputs are both given: nothing of batching is then completed, as in Triton."""
    return bool(config.input) and bool(config.output)


def complete(
    given: ModelConfig | None,
    signature: Signature,
    batching: BatchingDecision,
    groups: Sequence[InstanceGroup],
    options: ServerConfig,
    *,
    name: str,
    filename: str,
    scalars_as_one: bool,
) -> ModelConfig:
    """What is `given`, with all that it leaves open filled in; it is not changed itself.

    `signature` is the ONNX file's. A tensor without dimensions (behind the batch axis) is completed as one
    of shape [1] that is reshaped, as Triton does, if `scalars_as_one`; else without dimensions.
    """
    config = ModelConfig()
    if given is not None:
        config.CopyFrom(given)
    if config.name not in ("", name):
        raise ModelConfigError(
            f"the configuration of model {name!r} has the name {config.name!r}; it must be {name!r}, or none"
        )
    config.name = name
    config.platform, config.backend = PLATFORM, BACKEND
    config.default_model_filename = config.default_model_filename or filename
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    config.max_batch_size = batching.max_batch_size
    shares = signature.no_batch_axis_reason() is None
    given_inputs = signature.inputs + signature.optional
    for given_tensors, specs in ((config.input, given_inputs), (config.output, signature.outputs)):
        if not given_tensors:
            for spec in specs:
                _describe(
                    spec, given_tensors.add(), batching.max_batch_size > 0, scalars_as_one, shares=shares
                )
    _complete_batching(config, batching, options)
    del config.instance_group[:]
    for group in groups:
        config.instance_group.append(group.message)
    return config


def _describe(
    spec: TensorSpec,
    tensor: pb.ModelInput | pb.ModelOutput,
    batched: bool,
    scalars_as_one: bool,
    *,
    shares: bool,
) -> None:
    tensor.name = spec.name
    if isinstance(tensor, pb.ModelInput):
        tensor.optional = spec.optional
    if batched and (shares or spec.optional) and isinstance(tensor, pb.ModelInput) and not spec.has_row_axis:
        # Triton's word for it: requests share a batch only if these are equal, and they have no batch axis.
        tensor.is_shape_tensor = True
        batched = False
    tensor.data_type = getattr(pb, type_name(spec))
    if spec.any_rank:
        if batched and isinstance(tensor, pb.ModelInput):
            raise ModelConfigError(
                f"the ONNX file does not say how many dimensions input {spec.name!r} has: give the configuration an "
                f"input with its name, data_type and dims, or leave out max_batch_size"
            )
        tensor.dims.append(-1)
        return
    tensor.dims.extend(spec.shape[1:] if batched else spec.shape)
    if not tensor.dims and scalars_as_one:
        tensor.dims.append(1)
        if batched:
            tensor.reshape.SetInParent()


def _complete_batching(config: ModelConfig, batching: BatchingDecision, options: ServerConfig) -> None:
    dynamic = config.dynamic_batching
    if not batching.merges:
        # What is left says how requests are queued.
        dynamic.ClearField("preferred_batch_size")
        dynamic.ClearField("max_queue_delay_microseconds")
        if not dynamic.ListFields():
            config.ClearField("dynamic_batching")
        return
    if not config.HasField("dynamic_batching"):
        # Switched on by us: then the options say how.
        dynamic.SetInParent()
        dynamic.max_queue_delay_microseconds = round(options.max_queue_delay * 1e6)
        dynamic.preferred_batch_size.extend(
            size for size in options.preferred_batch_sizes if size <= batching.max_batch_size
        )
        classes = len(options.priority_weights)
        if classes > 1:
            dynamic.priority_levels = classes
            dynamic.default_priority_level = options.default_priority or classes
    if not dynamic.preferred_batch_size:
        dynamic.preferred_batch_size.append(batching.max_batch_size)
