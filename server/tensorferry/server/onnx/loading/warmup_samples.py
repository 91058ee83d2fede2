"""Warm-up samples of a model's configuration (`model_warmup`), which are run before the model is ready."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tensorferry.protos.model_config_pb2 import DataType, ModelConfig, ModelWarmup
from tensorferry.protos.tensors import TensorError, decode_raw
from tensorferry.server.errors import ModelConfigError, StartError
from tensorferry.server.models.config_pbtxt.pbtxt import type_name
from tensorferry.server.runtime.checks.sampling import Array, random_array
from tensorferry.server.runtime.host_memory import check_fits
from tensorferry.server.signature import Signature, TensorSpec

_log = logging.getLogger("tensorferry.server")

# Most runs of all samples together, because other models wait to be loaded meanwhile.
_MOST_RUNS = 1000
# The directory of sample files in the model's directory.
_DIRECTORY = "warmup"


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A sample: its inputs as clients send them, and the number of runs."""

    name: str
    count: int
    inputs: Mapping[str, Array]


def warmup_samples(config: ModelConfig, signature: Signature, directory: Path | None) -> list[WarmupSample]:
    """Return the samples of a completed configuration; log a warning about each that is left out.

    Files are read from `directory`, the model's. ModelConfigError names the sample and the invalid input.
    """
    samples = []
    runs = sum(max(1, given.count) for given in config.model_warmup)
    if runs > _MOST_RUNS:
        raise ModelConfigError(
            f"model_warmup of model {config.name!r} asks for {runs} runs; the limit is {_MOST_RUNS} in all: lower 'count'"
        )
    for index, given in enumerate(config.model_warmup):
        name = given.name or f"number {index + 1}"
        if given.batch_size == 0:
            _log.warning(
                "the warm-up sample %r of model %r has batch_size 0 and is left out, as in Triton: set it to at least 1",
                name,
                config.name,
            )
            continue
        try:
            inputs = _inputs(given, signature, config.max_batch_size, directory)
        except StartError as error:
            raise ModelConfigError(f"model_warmup {name!r} of model {config.name!r}: {error}") from None
        samples.append(WarmupSample(name, max(1, given.count), inputs))
    return samples


def _inputs(
    given: ModelWarmup, signature: Signature, max_batch_size: int, directory: Path | None
) -> dict[str, Array]:
    if given.batch_size > max(1, max_batch_size):
        raise ModelConfigError(
            f"batch_size is {given.batch_size}; it must be at most {max(1, max_batch_size)}, because max_batch_size is "
            f"{max_batch_size}"
        )
    expected = {spec.name: spec for spec in signature.inputs}
    if set(given.inputs) != set(expected):
        raise ModelConfigError(f"it has the inputs {sorted(given.inputs)}; the model has {sorted(expected)}")
    return {
        name: _array(
            given.inputs[name],
            spec,
            given.batch_size if max_batch_size and spec.has_row_axis else 0,
            directory,
        )
        for name, spec in expected.items()
    }


def _array(given: ModelWarmup.Input, spec: TensorSpec, rows: int, directory: Path | None) -> Array:
    """Return the array of an input: the same row `rows` times, or without a batch axis if `rows` is 0."""
    if DataType.Name(given.data_type) != type_name(spec):
        raise ModelConfigError(
            f"input {spec.name!r} has data_type {DataType.Name(given.data_type)}; the model takes {type_name(spec)}"
        )
    dims = tuple(given.dims)
    wanted = spec.shape[1:] if rows else spec.shape
    if any(dim < 0 for dim in dims):
        raise ModelConfigError(
            f"warmup setting expects all variable-size dimensions are specified for input {spec.name!r}, got {list(dims)}"
        )
    fits = len(dims) == len(wanted) and all(dim in (size, -1) for dim, size in zip(wanted, dims, strict=True))
    if not fits and not spec.any_rank:
        raise ModelConfigError(
            f"input {spec.name!r} has dims {list(dims)}; the model takes {list(wanted)}"
            + (" (without the batch axis)" if rows else "")
        )
    if 0 in dims and (
        spec.any_rank or any(dim == 0 and size == -1 for dim, size in zip(dims, wanted, strict=True))
    ):
        raise ModelConfigError(
            f"input {spec.name!r} has dims {list(dims)}; dynamic axes must have at least one element, because length zero "
            "crashes some models"
        )
    # A reference to a string has the size of a float64.
    size = math.prod(dims) * max(1, rows) * (spec.datatype.size or 8)
    check_fits(f"input {spec.name!r} with dims {list(dims)} and batch_size {rows}", size, "lower them")
    kind = given.WhichOneof("input_data_type")
    if kind is None:
        raise ModelConfigError(
            f"warmup setting expects input {spec.name!r} to have input_data_type set: zero_data, random_data or "
            "input_data_file"
        )
    if kind == "input_data_file":
        row = _from_file(given.input_data_file, spec, dims, directory)
    elif spec.datatype.name == "BYTES":
        # Random strings are also empty, as in Triton.
        row = np.full(dims, spec.element(""), dtype=object)
    elif kind == "zero_data":
        row = np.zeros(dims, spec.datatype.storage)
    else:
        row = random_array(spec, dims, np.random.default_rng(0))
    return np.repeat(row[None], rows, axis=0) if rows else row


def _from_file(name: str, spec: TensorSpec, dims: tuple[int, ...], directory: Path | None) -> Array:
    if directory is None:
        raise ModelConfigError(
            f"input {spec.name!r} comes from the file {name!r}, but the model has no directory with such files"
        )
    if "\0" in name:
        raise ModelConfigError(f"input {spec.name!r} comes from the file {name!r}, which is no file name")
    folder = (directory / _DIRECTORY).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise ModelConfigError(f"input {spec.name!r} comes from the file {name!r}, which is not in {folder}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelConfigError(
            f"input {spec.name!r} comes from the file {name!r}, which cannot be read: {error}"
        ) from None
    if spec.datatype.size:
        expected = math.prod(dims) * spec.datatype.size
        if len(data) < expected:
            raise ModelConfigError(
                f"warmup setting expects {expected} bytes, but the data provided from {name} only has {len(data)} bytes"
            )
        # Further bytes are ignored, as in Triton.
        data = data[:expected]
    try:
        array = decode_raw(data, spec.datatype, dims)
        if spec.datatype.size or spec.binary:
            return array
        texts = np.empty(array.size, dtype=object)
        texts[:] = [element.decode() for element in array.flat]
        return texts.reshape(dims)
    except (TensorError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"input {spec.name!r} comes from the file {name!r}: {error}") from None
