"""Commands that `tensorferry describe` prints: one request with example values, ready to run."""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import shlex
from typing import Any

import numpy as np

from tensorferry.client.cli.server_flags import TOKEN_VARIABLE
from tensorferry.client.connection.target import targets_of
from tensorferry.client.messages.checks import FLOATS, dtype_for, dtype_of
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, subject_of
from tensorferry.client.messages.several_answers import gives_several
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

# Most elements of an input that are written out. Longer inputs are random for `infer`, and zeros for grpcurl.
_MOST_ELEMENTS = 16
_SERVICE = "inference.GRPCInferenceService"
# Stands for zero bytes in the message; base64 has no such characters.
_ZEROS = "<zeros>"


def infer_command(model: ModelMetadata, arguments: argparse.Namespace) -> str:
    """Return a `tensorferry infer` command with example values; raise InvalidInput if there are none."""
    words = ["tensorferry", "infer", model.name]
    if arguments.model_version:
        words += ["--model-version", arguments.model_version]
    words += _server_flags(arguments)
    if not model.inputs:
        words += ["--input", "NAME=FILE.npy"]
    random = False
    for tensor in _required(model):
        if _is_short(tensor):
            words += ["--input", f"{tensor.name}={json.dumps(_values(tensor))}"]
            continue
        random = True
        if -1 in tensor.shape[1:]:
            words += ["--shape", f"{tensor.name}:{','.join(map(str, _shape(tensor)))}"]
    return shlex.join(words + ["--random"] * random)


def grpcurl_command(model: ModelMetadata, arguments: argparse.Namespace) -> str:
    """Return a grpcurl command for the same inputs; raise InvalidInput if there are no example values."""
    inputs = _required(model)
    message: dict[str, Any] = {"model_name": model.name}
    if arguments.model_version:
        message["model_version"] = arguments.model_version
    message["inputs"] = [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": list(_shape(tensor))} for tensor in inputs
    ]
    sizes: list[int] = []
    # A message has either typed contents for all inputs, or raw contents for all.
    if all(_is_short(tensor) and tensors.datatype(tensor.datatype).contents for tensor in inputs):
        for one, tensor in zip(message["inputs"], inputs, strict=True):
            one["contents"] = {str(tensors.datatype(tensor.datatype).contents): _field(tensor)}
    else:
        message["raw_input_contents"] = [_raw(tensor) if _is_short(tensor) else _ZEROS for tensor in inputs]
        # An element of BYTES without content is four zero bytes, its length.
        sizes = [
            math.prod(_shape(tensor)) * (tensors.datatype(tensor.datatype).size or 4)
            for tensor in inputs
            if not _is_short(tensor)
        ]
    target = shlex.quote(targets_of(arguments.target)[0])
    target += f" {_SERVICE}/{'ModelStreamInfer' if gives_several(model) else 'ModelInfer'}"
    call = f"grpcurl {_grpcurl_flags(arguments)}"
    data = shlex.quote(json.dumps(message))
    if not sizes:
        return f"{call} -d {data} {target}"
    pieces = data.rsplit(_ZEROS, len(sizes))
    data = pieces[0] + "".join(
        f"'$(head -c {size} /dev/zero | base64 -w 0)'{piece}"
        for size, piece in zip(sizes, pieces[1:], strict=True)
    )
    # On stdin, because an argument of a program has at most 128 KiB.
    return f"echo {data} | {call} -d @ {target}"


def _required(model: ModelMetadata) -> list[TensorMetadata]:
    """Return the inputs of every request; raise InvalidInput for a datatype that has no values here."""
    inputs = [tensor for tensor in model.inputs if not tensor.optional]
    for tensor in inputs:
        dtype_for(tensor, subject_of(tensor, model.name))
    return inputs


def _shape(tensor: TensorMetadata) -> tuple[int, ...]:
    return tuple(1 if size == -1 else size for size in tensor.shape)


def _is_short(tensor: TensorMetadata) -> bool:
    return math.prod(_shape(tensor)) <= _MOST_ELEMENTS


def _array(tensor: TensorMetadata) -> Array:
    value: object = 1
    if tensor.datatype == "BYTES":
        value = b"text"
    elif tensor.datatype in FLOATS:
        value = 0.5
    return np.full(_shape(tensor), value, dtype_of(tensor.datatype))


def _values(tensor: TensorMetadata) -> object:
    array = _array(tensor)
    if tensor.datatype == "BYTES":
        array = array.astype(np.str_)
    return array.tolist()


def _field(tensor: TensorMetadata) -> list[object]:
    if tensor.datatype == "BYTES":
        return [base64.b64encode(element).decode() for element in _array(tensor).flat]
    return _array(tensor).ravel().tolist()


def _raw(tensor: TensorMetadata) -> str:
    return base64.b64encode(tensors.encode_raw(_array(tensor))).decode()


def _server_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags for the server that the caller gave."""
    words = ["--target", arguments.target] if arguments.target else []
    words += ["--tls"] * arguments.tls
    for name in ("ca_file", "cert_file", "key_file", "token_file"):
        if getattr(arguments, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    words += ["--token-over-plaintext"] * arguments.token_over_plaintext
    for name, value in arguments.header:
        words += ["--header", f"{name}={value.decode() if isinstance(value, bytes) else value}"]
    return words


def _grpcurl_flags(arguments: argparse.Namespace) -> str:
    """Return grpcurl's flags for the same server."""
    files = {"-cacert": arguments.ca_file, "-cert": arguments.cert_file, "-key": arguments.key_file}
    words = [word for flag, file in files.items() if file is not None for word in (flag, file)]
    if not words and not arguments.tls:
        words.append("-plaintext")
    for name, value in arguments.header:
        # grpcurl expects values of -bin headers in base64.
        words += ["-H", f"{name}: {base64.b64encode(value).decode() if isinstance(value, bytes) else value}"]
    flags = shlex.join(words)
    if arguments.token_file not in (None, "-"):
        flags += f' -H "authorization: Bearer $(cat {shlex.quote(arguments.token_file)})"'
    elif arguments.token_file == "-" or os.environ.get(TOKEN_VARIABLE):
        flags += f' -H "authorization: Bearer ${TOKEN_VARIABLE}"'
    return flags.strip()
