"""What a client's message may hold: the longest name, id, key and text, and the most entries of each list.

One table for every message that the server takes. `structure.check` holds messages against it before they are parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# In bytes. Names of models are held to 128 characters when they are loaded; longer ones can name none.
MODEL_NAME = 128
# A version is a number.
VERSION = 32
# Exporters name tensors by the path of the node that makes them, some hundred characters long.
TENSOR_NAME = 4096
REQUEST_ID = 4096
DATATYPE = 64
PARAMETER_KEY = 1024
PARAMETER_TEXT = 64 * 1024
# What health is asked of: a model, or a gRPC service.
SERVICE_NAME = 256
# A name of a file, a message, a method or a field of the protocol.
SYMBOL = 1024
REGION_NAME = 1024
# A file name below /dev/shm, of at most 255 bytes, and slashes before it.
REGION_KEY = 512
# A CUDA IPC handle has 64 bytes; in base64, which is a known mistake with an error of its own, 88.
REGION_HANDLE = 1024
SETTING_NAME = 256
SETTING_VALUE = 4096
# A model's configuration in JSON.
CONFIG_TEXT = 1 << 20

# Entries. More than any model has, or any client has a use for.
MOST_TENSORS = 4096
MOST_DIMENSIONS = 64
MOST_PARAMETERS = 256
MOST_SETTINGS = 64
# The files of a model that a client uploads.
MOST_FILES = 1024

# All fields of a message, those within its fields included. A request of 4096 inputs has some 20,000.
MOST_FIELDS = 32_768
# Numbers of variable length in typed contents; raw contents have no such bound. Each takes some 40 ns.
MOST_INTEGERS = 1 << 20

# The largest message of a method other than ModelInfer, ModelStreamInfer and RepositoryModelLoad.
MOST_BYTES = 1 << 20

# Of no bound but the message's own size.
ANY_LENGTH = 1 << 62


class Bound(NamedTuple):
    """A field's most entries, where it repeats, and the longest value in bytes, where it is a text or bytes."""

    most: int = 1
    longest: int = ANY_LENGTH


def _text(longest: int) -> Bound:
    return Bound(longest=longest)


_MODEL = {"name": _text(MODEL_NAME), "version": _text(VERSION)}
_REGION = {"name": _text(REGION_NAME)}
_KEY = {"key": _text(PARAMETER_KEY)}
_SETTING_KEY = {"key": _text(SETTING_NAME)}
_SYMBOLS = {
    "host": _text(SYMBOL),
    "file_by_filename": _text(SYMBOL),
    "file_containing_symbol": _text(SYMBOL),
    "all_extension_numbers_of_type": _text(SYMBOL),
    "list_services": _text(SYMBOL),
}

# By the full name of a message, then by field: each text, each bytes and each list of each message that a client sends.
BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "inference.ModelReadyRequest": _MODEL,
    "inference.ModelMetadataRequest": _MODEL,
    "inference.ModelConfigRequest": _MODEL,
    "inference.ModelStatisticsRequest": _MODEL,
    "inference.ModelInferRequest": {
        "model_name": _text(MODEL_NAME),
        "model_version": _text(VERSION),
        "id": _text(REQUEST_ID),
        "parameters": Bound(MOST_PARAMETERS),
        "inputs": Bound(MOST_TENSORS),
        "outputs": Bound(MOST_TENSORS),
        "raw_input_contents": Bound(MOST_TENSORS),
    },
    "inference.ModelInferRequest.ParametersEntry": _KEY,
    "inference.InferParameter": {"string_param": _text(PARAMETER_TEXT)},
    "inference.ModelInferRequest.InferInputTensor": {
        "name": _text(TENSOR_NAME),
        "datatype": _text(DATATYPE),
        "shape": Bound(MOST_DIMENSIONS),
        "parameters": Bound(MOST_PARAMETERS),
    },
    "inference.ModelInferRequest.InferInputTensor.ParametersEntry": _KEY,
    "inference.ModelInferRequest.InferRequestedOutputTensor": {
        "name": _text(TENSOR_NAME),
        "parameters": Bound(MOST_PARAMETERS),
    },
    "inference.ModelInferRequest.InferRequestedOutputTensor.ParametersEntry": _KEY,
    "inference.RepositoryIndexRequest": {"repository_name": _text(MODEL_NAME)},
    "inference.RepositoryModelLoadRequest": {
        "repository_name": _text(MODEL_NAME),
        "model_name": _text(MODEL_NAME),
        "parameters": Bound(MOST_FILES),
    },
    "inference.RepositoryModelLoadRequest.ParametersEntry": _KEY,
    "inference.RepositoryModelUnloadRequest": {
        "repository_name": _text(MODEL_NAME),
        "model_name": _text(MODEL_NAME),
        "parameters": Bound(MOST_PARAMETERS),
    },
    "inference.RepositoryModelUnloadRequest.ParametersEntry": _KEY,
    "inference.ModelRepositoryParameter": {
        "string_param": _text(CONFIG_TEXT),
        # A file of a model.
        "bytes_param": _text(ANY_LENGTH),
    },
    "inference.SystemSharedMemoryStatusRequest": _REGION,
    "inference.SystemSharedMemoryRegisterRequest": {**_REGION, "key": _text(REGION_KEY)},
    "inference.SystemSharedMemoryUnregisterRequest": _REGION,
    "inference.CudaSharedMemoryStatusRequest": _REGION,
    "inference.CudaSharedMemoryRegisterRequest": {**_REGION, "raw_handle": _text(REGION_HANDLE)},
    "inference.CudaSharedMemoryUnregisterRequest": _REGION,
    "inference.TraceSettingRequest": {
        "settings": Bound(MOST_SETTINGS),
        "model_name": _text(MODEL_NAME),
    },
    "inference.TraceSettingRequest.SettingsEntry": _SETTING_KEY,
    "inference.TraceSettingRequest.SettingValue": {"value": Bound(MOST_SETTINGS, SETTING_VALUE)},
    "inference.LogSettingsRequest": {"settings": Bound(MOST_SETTINGS)},
    "inference.LogSettingsRequest.SettingsEntry": _SETTING_KEY,
    "inference.LogSettingsRequest.SettingValue": {"string_param": _text(SETTING_VALUE)},
    "grpc.health.v1.HealthCheckRequest": {"service": _text(SERVICE_NAME)},
    "grpc.reflection.v1.ServerReflectionRequest": _SYMBOLS,
    "grpc.reflection.v1.ExtensionRequest": {"containing_type": _text(SYMBOL)},
}
