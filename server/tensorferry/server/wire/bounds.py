"""Bounds on clients' messages: the length of each name, id, key and text, and the entries of each list.

One table for every message that the server takes. `structure.check_message` checks messages against it before they are
parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# In bytes. A model with a longer name cannot be loaded.
MODEL_NAME_BYTES = 128
# A version is a number.
VERSION_BYTES = 32
# Exporters name tensors by the path of the node that makes them, often more than a hundred characters.
TENSOR_NAME_BYTES = 4096
REQUEST_ID_BYTES = 4096
DATATYPE_BYTES = 64
PARAMETER_KEY_BYTES = 1024
PARAMETER_TEXT_BYTES = 64 * 1024
# A service whose health is checked: a model, or a gRPC service.
SERVICE_NAME_BYTES = 256
# A name of a file, a message, a method or a field of the protocol.
SYMBOL_BYTES = 1024
REGION_NAME_BYTES = 1024
# A file name of at most 255 bytes below /dev/shm, after any number of slashes.
REGION_KEY_BYTES = 512
# A CUDA IPC handle has 64 bytes, or 88 in base64: a known mistake, which has its own error.
REGION_HANDLE_BYTES = 1024
SETTING_NAME_BYTES = 256
SETTING_VALUE_BYTES = 4096
# A model's configuration in JSON.
CONFIG_TEXT_BYTES = 1 << 20

# In entries: more than any model has.
MAX_TENSORS = 4096
MAX_DIMENSIONS = 64
MAX_PARAMETERS = 256
MAX_SETTINGS = 64
# Files that a client uploads for one model.
MAX_FILES = 1024

# Fields of a message at all depths. A request with 4096 inputs has about 20,000.
MAX_FIELDS = 32_768
# Varints in typed contents, because parsing each takes about 40 ns. Raw contents have no such bound.
MAX_INTEGERS = 1 << 20

# Strings in a tensor, and in the typed contents of a request, because each is decoded on its own.
MAX_STRINGS = 1 << 16

# The largest message of a method other than ModelInfer, ModelStreamInfer and RepositoryModelLoad.
MAX_MESSAGE_BYTES = 1 << 20

# No bound but the message's size.
ANY_LENGTH = 1 << 62


class FieldBound(NamedTuple):
    """The most entries of a repeated field, and the most bytes of each value of a text or bytes field."""

    max_entries: int = 1
    max_bytes: int = ANY_LENGTH


def _at_most_bytes(max_bytes: int) -> FieldBound:
    return FieldBound(max_bytes=max_bytes)


_MODEL = {"name": _at_most_bytes(MODEL_NAME_BYTES), "version": _at_most_bytes(VERSION_BYTES)}
_REGION = {"name": _at_most_bytes(REGION_NAME_BYTES)}
_KEY = {"key": _at_most_bytes(PARAMETER_KEY_BYTES)}
_SETTING_KEY = {"key": _at_most_bytes(SETTING_NAME_BYTES)}
_SYMBOLS = dict.fromkeys(
    ("host", "file_by_filename", "file_containing_symbol", "all_extension_numbers_of_type", "list_services"),
    _at_most_bytes(SYMBOL_BYTES),
)

# By message name, then by field: every text, bytes and repeated field of every message that clients send.
FIELD_BOUNDS: Mapping[str, Mapping[str, FieldBound]] = {
    "inference.ModelReadyRequest": _MODEL,
    "inference.ModelMetadataRequest": _MODEL,
    "inference.ModelConfigRequest": _MODEL,
    "inference.ModelStatisticsRequest": _MODEL,
    "inference.ModelInferRequest": {
        "model_name": _at_most_bytes(MODEL_NAME_BYTES),
        "model_version": _at_most_bytes(VERSION_BYTES),
        "id": _at_most_bytes(REQUEST_ID_BYTES),
        "parameters": FieldBound(MAX_PARAMETERS),
        "inputs": FieldBound(MAX_TENSORS),
        "outputs": FieldBound(MAX_TENSORS),
        "raw_input_contents": FieldBound(MAX_TENSORS),
    },
    "inference.ModelInferRequest.ParametersEntry": _KEY,
    "inference.InferParameter": {"string_param": _at_most_bytes(PARAMETER_TEXT_BYTES)},
    "inference.ModelInferRequest.InferInputTensor": {
        "name": _at_most_bytes(TENSOR_NAME_BYTES),
        "datatype": _at_most_bytes(DATATYPE_BYTES),
        "shape": FieldBound(MAX_DIMENSIONS),
        "parameters": FieldBound(MAX_PARAMETERS),
    },
    "inference.ModelInferRequest.InferInputTensor.ParametersEntry": _KEY,
    "inference.ModelInferRequest.InferRequestedOutputTensor": {
        "name": _at_most_bytes(TENSOR_NAME_BYTES),
        "parameters": FieldBound(MAX_PARAMETERS),
    },
    "inference.ModelInferRequest.InferRequestedOutputTensor.ParametersEntry": _KEY,
    "inference.RepositoryIndexRequest": {"repository_name": _at_most_bytes(MODEL_NAME_BYTES)},
    "inference.RepositoryModelLoadRequest": {
        "repository_name": _at_most_bytes(MODEL_NAME_BYTES),
        "model_name": _at_most_bytes(MODEL_NAME_BYTES),
        "parameters": FieldBound(MAX_FILES),
    },
    "inference.RepositoryModelLoadRequest.ParametersEntry": _KEY,
    "inference.RepositoryModelUnloadRequest": {
        "repository_name": _at_most_bytes(MODEL_NAME_BYTES),
        "model_name": _at_most_bytes(MODEL_NAME_BYTES),
        "parameters": FieldBound(MAX_PARAMETERS),
    },
    "inference.RepositoryModelUnloadRequest.ParametersEntry": _KEY,
    "inference.ModelRepositoryParameter": {
        "string_param": _at_most_bytes(CONFIG_TEXT_BYTES),
        # An uploaded file.
        "bytes_param": _at_most_bytes(ANY_LENGTH),
    },
    "inference.SystemSharedMemoryStatusRequest": _REGION,
    "inference.SystemSharedMemoryRegisterRequest": {**_REGION, "key": _at_most_bytes(REGION_KEY_BYTES)},
    "inference.SystemSharedMemoryUnregisterRequest": _REGION,
    "inference.CudaSharedMemoryStatusRequest": _REGION,
    "inference.CudaSharedMemoryRegisterRequest": {
        **_REGION,
        "raw_handle": _at_most_bytes(REGION_HANDLE_BYTES),
    },
    "inference.CudaSharedMemoryUnregisterRequest": _REGION,
    "inference.TraceSettingRequest": {
        "settings": FieldBound(MAX_SETTINGS),
        "model_name": _at_most_bytes(MODEL_NAME_BYTES),
    },
    "inference.TraceSettingRequest.SettingsEntry": _SETTING_KEY,
    "inference.TraceSettingRequest.SettingValue": {"value": FieldBound(MAX_SETTINGS, SETTING_VALUE_BYTES)},
    "inference.LogSettingsRequest": {"settings": FieldBound(MAX_SETTINGS)},
    "inference.LogSettingsRequest.SettingsEntry": _SETTING_KEY,
    "inference.LogSettingsRequest.SettingValue": {"string_param": _at_most_bytes(SETTING_VALUE_BYTES)},
    "grpc.health.v1.HealthCheckRequest": {"service": _at_most_bytes(SERVICE_NAME_BYTES)},
    "grpc.reflection.v1.ServerReflectionRequest": _SYMBOLS,
    "grpc.reflection.v1.ExtensionRequest": {"containing_type": _at_most_bytes(SYMBOL_BYTES)},
}
