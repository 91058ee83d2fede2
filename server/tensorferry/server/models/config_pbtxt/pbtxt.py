"""Reading and completion of a model's config.pbtxt.

The configuration is completed from the ONNX file and the server's options. The completed configuration describes what
is really used. ModelConfig returns it to clients, and `settings_of` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import InstanceGroup
from tensorferry.server.signature import Signature, TensorSpec

PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"
# Platform and backend of a model whose code is Python.
PYTHON = "python"

# Options of TensorRT with the paths of libraries.
_TENSORRT_LIBRARIES = ("trt_extra_plugin_lib_paths", "trt_engine_decryption_lib_path")
# The only datatype with a different name in the configuration than in the protocol.
_CONFIG_NAMES = {"BYTES": "STRING"}


@dataclass(frozen=True, slots=True)
class BatchingDecision:
    """Batching settings of a model.

    If `max_batch_size` is above 0, axis 0 counts rows, and `merges` says whether requests share a batch. `description`
    is for people. `verdict` is for programs: proved, tested, trusted, refused or off. `reason` names the nodes or outputs
    that decide, or the option; empty if nothing stands in the way. `evidence` says what was run, `remedies` what to change.
    `rewritten`: a copy of the file is served, in which the batch axis is variable and the first.
    """

    max_batch_size: int
    merges: bool
    description: str
    verdict: str = "off"
    reason: str = ""
    evidence: str = ""
    remedies: tuple[str, ...] = ()
    rewritten: bool = False


def read_config(path: Path) -> ModelConfig:
    """Return the configuration in a config.pbtxt; ModelConfigError names the file and the faulty line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None
    return parse_config(text, str(path))


def parse_config(text: str, source: str) -> ModelConfig:
    """Return the configuration in a text; ModelConfigError names the source and the faulty line."""
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        # The message begins with the position, if there is one.
        reason = str(error).split(" : ", 1)[-1]
        line, column = error.GetLine(), error.GetColumn()
        position = f"line {line}, column {column}" if line is not None else "its text"
        raise ModelConfigError(
            f"{source}: {position}: {reason} (a text-format inference.ModelConfig is expected)"
        ) from None


def named_libraries(config: ModelConfig) -> frozenset[str]:
    """Return the shared libraries that a configuration names: of custom operators, and of options of TensorRT."""
    of_tensorrt = [
        accelerator.parameters[option]
        for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator
        for option in _TENSORRT_LIBRARIES
        if option in accelerator.parameters
    ]
    return frozenset([*config.model_operations.op_library_filename, *of_tensorrt])


def config_text(config: ModelConfig) -> str:
    """Return a configuration in the text format of config.pbtxt, in ASCII, so that no name controls a terminal."""
    return text_format.MessageToString(config, as_utf8=False)


def type_name(spec: TensorSpec) -> str:
    """Return the configuration's name of a tensor's datatype."""
    name = spec.datatype.name
    return f"TYPE_{_CONFIG_NAMES.get(name, name)}"


def datatype_of(data_type: int) -> str:
    """Return the protocol's name of a configuration's datatype; ModelConfigError for none."""
    name = pb.DataType.Name(data_type).removeprefix("TYPE_")
    if name == "INVALID":
        raise ModelConfigError("a tensor has no data_type; give it one, such as TYPE_FP32")
    return "BYTES" if name == "STRING" else name


def is_complete(config: ModelConfig) -> bool:
    """Whether inputs and outputs are both given. Batching is then not completed, as in Triton."""
    return bool(config.input) and bool(config.output)


def complete_config(
    given: ModelConfig,
    source: ModelSource,
    signature: Signature,
    batching: BatchingDecision,
    groups: Sequence[InstanceGroup],
    server_config: ServerConfig,
) -> ModelConfig:
    """Return a copy of `given` in which all open fields are filled in. `signature` is that of the ONNX file.

    The name is that of the source, which the repository has compared with that in `given`.

    A tensor without dimensions behind the batch axis gets none if the source is a file. If the source is in a
    repository, it gets the shape [1] and a reshape, as in Triton.
    """
    config = ModelConfig()
    config.CopyFrom(given)
    config.name = source.name
    config.platform, config.backend = PLATFORM, BACKEND
    config.default_model_filename = config.default_model_filename or source.path.name
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    config.max_batch_size = batching.max_batch_size
    shares = signature.no_batch_axis_reason() is None
    scalars_as_one = source.directory is not None
    inputs = signature.inputs + signature.optional
    for tensors, specs in ((config.input, inputs), (config.output, signature.outputs)):
        if not tensors:
            for spec in specs:
                _describe(spec, tensors.add(), batching.max_batch_size > 0, scalars_as_one, shares=shares)
    _complete_batching(config, batching, server_config)
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
        # In Triton, a shape tensor has no batch axis, and requests share a batch only if it is equal in them.
        tensor.is_shape_tensor = True
        batched = False
    tensor.data_type = getattr(pb, type_name(spec))
    if spec.any_rank:
        if batched and isinstance(tensor, pb.ModelInput):
            raise ModelConfigError(
                f"the ONNX file does not give the number of dimensions of input {spec.name!r}: add an input with its "
                f"name, data_type and dims to the configuration, or leave out max_batch_size"
            )
        tensor.dims.append(-1)
        return
    tensor.dims.extend(spec.shape[1:] if batched else spec.shape)
    if not tensor.dims and scalars_as_one:
        tensor.dims.append(1)
        if batched:
            tensor.reshape.SetInParent()


def _complete_batching(config: ModelConfig, batching: BatchingDecision, server_config: ServerConfig) -> None:
    dynamic = config.dynamic_batching
    if not batching.merges:
        # The remaining fields describe the queue.
        dynamic.ClearField("preferred_batch_size")
        dynamic.ClearField("max_queue_delay_microseconds")
        if not dynamic.ListFields():
            config.ClearField("dynamic_batching")
        return
    if not config.HasField("dynamic_batching"):
        # The server turns batching on, so its options apply.
        dynamic.SetInParent()
        dynamic.max_queue_delay_microseconds = round(server_config.max_queue_delay * 1e6)
        dynamic.preferred_batch_size.extend(
            size for size in server_config.preferred_batch_sizes if size <= batching.max_batch_size
        )
        classes = len(server_config.priority_weights)
        if classes > 1:
            dynamic.priority_levels = classes
            dynamic.default_priority_level = server_config.default_priority or classes
    if not dynamic.preferred_batch_size:
        dynamic.preferred_batch_size.append(batching.max_batch_size)
