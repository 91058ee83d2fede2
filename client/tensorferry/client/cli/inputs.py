"""Inputs of `tensorferry infer`, as arrays of the model's datatypes: those of --input and --json, and random ones."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensorferry.client import errors
from tensorferry.client.cli.array_files import read_archive, read_array
from tensorferry.client.cli.values import array_of
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.load.requests import random_array, random_shape
from tensorferry.client.messages.arguments import mapping, quoted, shown, text
from tensorferry.client.messages.codec import StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, subject_of
from tensorferry.client.messages.results import Classification, Parameter
from tensorferry.protos.tensors import Array

_NUMPY_MAGIC = b"\x93NUMPY"
# Keys of the protocol's JSON form that are understood.
_REQUEST_KEYS = ("inputs", "outputs", "parameters", "id")
_TENSOR_KEYS = ("name", "shape", "datatype", "data")
_TENSOR_FORM = '{"name", "shape", "datatype", "data"}'


def read_inputs(options: Sequence[str], model: ModelMetadata) -> dict[str, Array]:
    """Return the arrays of all --input options.

    Each is NAME=VALUE, VALUE for a model with one input, or FILE.npz.
    """
    inputs: dict[str, Array] = {}
    for option in options:
        if not model.inputs:
            add_once(inputs, _file_for_undeclared(option, model), "--input")
            continue
        tensor, value = _named(option, model)
        if tensor is not None:
            found = {tensor.name: array_of(_read_value(value, tensor, model), tensor, model.name)}
        else:
            found = _converted(_read_archive(option), f"--input {option}", model)
        add_once(inputs, found, "--input")
    return inputs


def add_once(inputs: dict[str, Array], more: Mapping[str, Array], option: str) -> None:
    """Add inputs; raise InvalidInput for one that is there already."""
    for name, array in more.items():
        if name in inputs:
            raise InvalidInput(option, "each input once", f"{name!r} more than once", "give it once")
        inputs[name] = array


def read_json(source: str, model: ModelMetadata) -> StreamRequest:
    """Return the request of --json, with arrays: JSON itself, the name of a file with it, or - for stdin."""
    inline = source.lstrip()[:1] in ("{", "[")
    content = source if inline else read_bytes(source, "--json")
    value = _parsed(content, "--json", 'a JSON object such as {"x": [[1, 2]]}')
    if not model.inputs and not (isinstance(value, dict) and "inputs" in value):
        raise _undeclared("--json", f'{{"inputs": [{_TENSOR_FORM}]}}', value, model)
    if not isinstance(value, dict):
        tensor = _only_input(model, "--json", value)
        return StreamRequest({tensor.name: array_of(value, tensor, model.name)})
    if _is_protocol_form(value, model):
        return _protocol_form(value, model)
    return StreamRequest(_converted(value, "--json", model))


def read_bytes(file: str, subject: str) -> bytes:
    """Return the content of a file, or of stdin for -."""
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(
            subject, "a file that can be read", f"{file!r} ({reason})", "name a file, or - for stdin"
        ) from None


def without_inputs(error: InferenceError, model: ModelMetadata) -> InferenceError:
    """Return the error of a request without inputs, with the reason why it had none."""
    hint = f"the request had no inputs, because the server names none of model {model.name!r}: give --input NAME=FILE.npy"
    return errors.of_code(error.code, f"{error.message} ({hint})", error.request_id, error.retry_after)


def _undeclared(option: str, form: str, received: object, model: ModelMetadata) -> InvalidInput:
    """Return the error for an input without a datatype, of a model whose metadata names no inputs."""
    expected = f"{form}, because the server names no inputs of model {model.name!r}"
    return InvalidInput(option, expected, shown(received), "give each input's name and datatype")


def _file_for_undeclared(option: str, model: ModelMetadata) -> dict[str, Array]:
    """Return the arrays of --input for a model whose metadata names no inputs: a file has their datatypes."""
    name, equals, file = option.partition("=")
    if equals and file.endswith(".npy"):
        return {name: _array_file(file, f"input {name!r} of model {model.name!r}")}
    if option.endswith(".npz"):
        return _read_archive(option)
    raise _undeclared("--input", "NAME=FILE.npy or FILE.npz", option, model)


def _named(option: str, model: ModelMetadata) -> tuple[TensorMetadata | None, str]:
    """Split NAME=VALUE, and return the input of that name. It is None for an archive."""
    named = [tensor for tensor in model.inputs if option.startswith(f"{tensor.name}=")]
    if named:
        tensor = max(named, key=lambda one: len(one.name))
        return tensor, option[len(tensor.name) + 1 :]
    if option.endswith(".npz"):
        return None, option
    before, equals, value = option.partition("=")
    if equals and option[0] not in '[{"@':
        return _input(before, "--input", model), value
    return _only_input(model, "--input", option), option


def _only_input(model: ModelMetadata, option: str, value: object) -> TensorMetadata:
    required = [tensor for tensor in model.inputs if not tensor.optional] or list(model.inputs)
    if len(required) == 1:
        return required[0]
    form = "NAME=VALUE" if option == "--input" else '{"NAME": VALUE}'
    names = quoted(tensor.name for tensor in model.inputs)
    expected = f"{form}, because model {model.name!r} has the inputs {names}"
    raise InvalidInput(option, expected, shown(value), "add the input's name")


def _input(name: object, option: str, model: ModelMetadata) -> TensorMetadata:
    """Return the input of this name; raise InvalidInput if there is none."""
    for tensor in model.inputs:
        if tensor.name == name:
            return tensor
    names = ", ".join(repr(tensor.name) for tensor in model.inputs)
    expected = f"an input of model {model.name!r} ({names or 'it has none'})"
    raise InvalidInput(option, expected, repr(str(name)), "name one of these")


def _converted(values: Mapping[str, object], option: str, model: ModelMetadata) -> dict[str, Array]:
    """Return the arrays of values by the names of inputs."""
    return {name: array_of(one, _input(name, option, model), model.name) for name, one in values.items()}


def _read_archive(file: str) -> dict[str, Array]:
    try:
        return read_archive(Path(file))
    except (OSError, ValueError) as error:
        received = f"{file!r}, which cannot be read ({error})"
        raise InvalidInput("--input", "a file that numpy.savez wrote", received, "name such a file") from None


def _read_value(given: str, tensor: TensorMetadata, model: ModelMetadata) -> object:
    """Return what the text of an input's value stands for."""
    subject = subject_of(tensor, model.name)
    is_bytes = tensor.datatype == "BYTES"
    if given.startswith("@"):
        content = read_bytes(given[1:], subject)
        if is_bytes:
            return content
        if content.startswith(_NUMPY_MAGIC):
            return _array(io.BytesIO(content), given[1:], subject)
        example = _example(tensor)
        return _parsed(content, f"{subject}, {given},", f"JSON such as {example}")
    if given.endswith(".npy"):
        return _array_file(given, subject)
    if given.endswith(".npz"):
        change = f"write --input {given}, which names its arrays"
        raise InvalidInput(subject, str(tensor), f"the archive {given!r}", change)
    if is_bytes:
        if given[:1] in ("[", '"'):
            change = f"strings in quotes, such as {_example(tensor)}, or a text without quotes"
            return _parsed(given, subject, change)
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        if os.path.isfile(given):
            return _array_file(given, subject)
    change = f"write JSON, such as {tensor.name}={_example(tensor)}, or name a file that numpy.save wrote"
    raise InvalidInput(subject, str(tensor), repr(given), change)


def _array_file(name: str, subject: str) -> Array:
    try:
        with Path(name).open("rb") as file:
            return _array(file, name, subject)
    except OSError as error:
        raise InvalidInput(
            subject,
            "a file that can be read",
            f"{name!r} ({error.strerror})",
            "name a file that numpy.save wrote",
        ) from None


def _array(file: BinaryIO, name: str, subject: str) -> Array:
    try:
        return read_array(file)
    except ValueError as error:
        received = f"{name!r}, which cannot be read as an array ({error})"
        raise InvalidInput(subject, "an array", received, "name a file that numpy.save wrote") from None


def _example(tensor: TensorMetadata) -> str:
    element = '"a"' if tensor.datatype == "BYTES" else "true" if tensor.datatype == "BOOL" else "0"
    return "[" * len(tensor.shape) + element + "]" * len(tensor.shape)


def _parsed(content: str | bytes, subject: str, expected: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(subject, expected, shown(content), f"correct it ({error})") from None


def _is_protocol_form(value: Mapping[str, object], model: ModelMetadata) -> bool:
    """Return whether an object is a request of the protocol, and not a map of input names to values."""
    inputs = value.get("inputs")
    if all(tensor.name != "inputs" for tensor in model.inputs):
        return "inputs" in value
    return isinstance(inputs, list) and all(isinstance(one, dict) and "name" in one for one in inputs)


def _protocol_form(value: Mapping[str, Any], model: ModelMetadata) -> StreamRequest:
    _check_keys("--json", value, _REQUEST_KEYS)
    inputs: dict[str, Array] = {}
    outputs: dict[str, Classification | None] | None = None
    parameters: Mapping[str, Parameter] | None = None
    for one in _objects(value, "inputs", _TENSOR_FORM):
        name = one.get("name")
        subject = f"--json: input {name!r}"
        _check_keys(subject, one, _TENSOR_KEYS)
        shape = one.get("shape")
        if shape is not None and not _is_shape(shape):
            raise InvalidInput(subject, "a shape such as [1, 2]", shown(shape), "write a list of lengths")
        if not model.inputs:
            tensor = _declared_by(one, shape, subject, model)
        else:
            tensor = _input(name, "--json", model)
        if "data" not in one:
            raise InvalidInput(subject, "data", "none", "add a list of its values")
        if one.get("datatype", tensor.datatype) != tensor.datatype:
            change = f"write {tensor.datatype!r}, or leave it out"
            raise InvalidInput(subject_of(tensor, model.name), str(tensor), shown(one["datatype"]), change)
        add_once(inputs, {tensor.name: array_of(one["data"], tensor, model.name, shape)}, "--json")
    if "outputs" in value:
        outputs = {}
        for one in _objects(value, "outputs", '{"name"}'):
            name = text("--json: the name of an output", one.get("name"))
            outputs[name] = _classification(f"--json: output {name!r}", one)
    if "parameters" in value:
        change = 'write {"parameters": {"NAME": VALUE}}'
        parameters = mapping("--json: 'parameters'", value["parameters"], change)
    return StreamRequest(inputs, text("--json: 'id'", value.get("id", "")), outputs, parameters)


def _declared_by(
    one: Mapping[str, object], shape: Sequence[int] | None, subject: str, model: ModelMetadata
) -> TensorMetadata:
    """Return the metadata that an input in the protocol's form states of itself."""
    name, datatype = one.get("name"), one.get("datatype")
    if not isinstance(name, str) or not isinstance(datatype, str) or shape is None:
        raise _undeclared(subject, _TENSOR_FORM, dict(one), model)
    return TensorMetadata(name, datatype, (-1,) * len(shape))


def _classification(subject: str, output: Mapping[str, Any]) -> Classification | None:
    _check_keys(subject, output, ("name", "parameters"))
    change = 'write {"classification": N}, or leave it out'
    parameters = mapping(f"{subject}: 'parameters'", output.get("parameters", {}), change)
    _check_keys(f"{subject}: 'parameters'", parameters, ("classification",))
    return Classification(parameters["classification"]) if parameters else None


def _objects(value: Mapping[str, Any], key: str, form: str) -> list[dict[str, Any]]:
    found = value[key]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        change = "or give a map of input names to values, without the key 'inputs'"
        raise InvalidInput(f"--json: {key!r}", f"a list of objects {form}", shown(found), change)
    return found


def _check_keys(subject: str, value: Mapping[str, object], known: Sequence[str]) -> None:
    unknown = [key for key in value if key not in known]
    if unknown:
        names = quoted(unknown)
        raise InvalidInput(subject, f"the keys {quoted(known)}", names, f"remove {names}")


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
    )


def dimensions(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return the name, if there is one, and the lengths in the text of --shape."""
    # From the right, because names may have colons.
    name, colon, sizes = text.rpartition(":")
    numbers = sizes.split(",") if sizes else []
    if (not sizes and not colon) or not all(n.isascii() and n.isdecimal() and len(n) < 19 for n in numbers):
        raise argparse.ArgumentTypeError(f"expected [NAME:]DIMS, such as x:2,16, got {text!r}")
    return name or None, tuple(map(int, numbers))


def shapes_of(
    given: Sequence[tuple[str | None, tuple[int, ...]]], model: ModelMetadata
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of --shape by input. The only input of a model needs no name. InvalidInput."""
    shapes: dict[str, tuple[int, ...]] = {}
    names = [tensor.name for tensor in model.inputs]
    for name, shape in given:
        if name is None and len(names) != 1:
            expected = f"NAME:DIMS, because the model has the inputs {quoted(names)}"
            change = "write the input's name before it, as in x:2,16"
            raise InvalidInput("--shape", expected, ",".join(map(str, shape)), change)
        known = name or model.inputs[0].name
        if known in shapes:
            raise InvalidInput("--shape", "one for each input", f"two for {known!r}", "give it once")
        if known not in names:
            change = f"name one of {quoted(names)}"
            raise InvalidInput("--shape", f"an input of model {model.name!r}", repr(known), change)
        shapes[known] = shape
    return shapes


def random_inputs(
    model: ModelMetadata,
    given: Mapping[str, object],
    seed: int,
    rows: int | None,
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Array]:
    """Return an array for each input that is neither given nor optional.

    The same seed makes the same arrays. `rows` is the length of the first axis where the model
    leaves it open, 1 by default. Other open axes need a shape in `shapes`.
    """
    generator = np.random.default_rng(seed)
    return {
        tensor.name: random_array(
            tensor, random_shape(tensor, model.name, rows, shapes), model.name, generator
        )
        for tensor in model.inputs
        if tensor.name not in given and (not tensor.optional or tensor.name in shapes)
    }
