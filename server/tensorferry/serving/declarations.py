"""Declarations of models: functions, ONNX files, and pipelines of steps. Nothing is run or loaded here.

Declarations are immutable and can be used by any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy.typing as npt

from tensorferry.serving.declaration_checks import (
    check_batch_size,
    check_function,
    check_name,
    check_outputs,
    checked_pad_lengths,
)
from tensorferry.serving.errors import DeclarationError
from tensorferry.serving.tensor_types import TensorType, types_of_hints
from tensorferry.serving.text_tasks import TextHead, TextTask


@dataclass(frozen=True, slots=True)
class RowPadding:
    """How an ONNX step that declares no padding pads rows of different lengths.

    `lengths` ascend; a row is padded to the next one. `values` has the pad value of each output of the function.
    """

    lengths: tuple[int, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class FileElsewhere:
    """A file that the server fetches before it loads a function; `declare` returns the function that reads the copy."""

    address: str = field(repr=False)
    declare: Callable[[Path], FunctionModel]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionModel:
    """A Python function, or a class with `load` and `__call__`, that is served as a model. Made by `model`.

    A call runs the function; of a class it makes an object. `max_batch_size` is None for the server's default, 0 for
    requests without a batch axis. `batched` is false for a function of one row. `example` has an array for each input.
    `check`, `steady`, `streams` and `pure` are as in `model`. `row_padding` returns how rows of its outputs are padded by default; it may
    read files. `elsewhere` is the file that it reads, if that must be fetched first. `most_request_bytes` bounds the
    requests of clients; 0 is no bound. With `takes_requests`, `function` makes an object with `load`, `close`, and
    `run`, which takes the inputs of a batch and the rows of each request; or, if it `streams`, with `answers`, which takes
    those of one request.
    """

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    max_batch_size: int | None = None
    workers: int = 1
    processes: int = 0
    batched: bool = True
    check: bool = True
    steady: bool = False
    example: Mapping[str, npt.ArrayLike] | None = None
    row_padding: Callable[[], RowPadding] | None = None
    elsewhere: FileElsewhere | None = None
    most_request_bytes: int = 0
    streams: bool = False
    pure: bool = False
    takes_requests: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_function(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or make an object of the class, as without the decorator."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """An ONNX file as a step of a pipeline, or served by itself. Made by `onnx`.

    `address` is where the file is fetched from, empty for a local one; `path` is then only its name. `head` is added to the
    end of its graph. `states` maps inputs to the outputs that are their next values in a sequence.
    """

    name: str
    path: Path
    max_batch_size: int | None = None
    pad_lengths: tuple[str, tuple[int, ...]] | None = None
    pad_values: Mapping[str, Any] = field(default_factory=dict)
    address: str = field(default="", repr=False)
    head: TextHead | None = None
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of a pipeline. Made by `step`.

    `model` is a declared model, or the name of another model that the server has. `inputs` maps names of the model's
    inputs to names of the pipeline's tensors, `outputs` those of its outputs. Other names are the same in both.
    """

    model: FunctionModel | OnnxModel | str
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the step's model."""
        return self.model if isinstance(self.model, str) else self.model.name


@dataclass(frozen=True, slots=True, eq=False)
class PipelineModel:
    """Steps that are served as one model. Made by `pipeline`.

    `outputs` are the names of the tensors that clients get; None for all outputs of the last step. `task` is what it does
    with texts.
    """

    name: str
    steps: tuple[Step, ...]
    outputs: tuple[str, ...] | None = None
    task: TextTask | None = None

    def __post_init__(self) -> None:
        check_name(self.name)


Declaration = FunctionModel | OnnxModel | PipelineModel


# Where `pipeline` adds what it makes, if it is set: while a server imports a file, which may forget to bind some to a name.
MADE_PIPELINES: ContextVar[list[PipelineModel] | None] = ContextVar("MADE_PIPELINES", default=None)


@overload
def model(function: Callable[..., Any], /) -> FunctionModel: ...
@overload
def model(
    *,
    name: str | None = None,
    inputs: Mapping[str, TensorType] | None = None,
    outputs: Mapping[str, TensorType] | None = None,
    max_batch_size: int | None = None,
    workers: int = 1,
    processes: int = 0,
    batched: bool = True,
    check: bool = True,
    steady: bool = False,
    streams: bool = False,
    pure: bool = False,
    example: Mapping[str, npt.ArrayLike] | None = None,
) -> Callable[[Callable[..., Any]], FunctionModel]: ...
def model(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    inputs: Mapping[str, TensorType] | None = None,
    outputs: Mapping[str, TensorType] | None = None,
    max_batch_size: int | None = None,
    workers: int = 1,
    processes: int = 0,
    batched: bool = True,
    check: bool = True,
    steady: bool = False,
    streams: bool = False,
    pure: bool = False,
    example: Mapping[str, npt.ArrayLike] | None = None,
) -> FunctionModel | Callable[[Callable[..., Any]], FunctionModel]:
    """Declare a function, or a class, as a model.

        @model(inputs={"x": FP32[-1, 4]}, outputs={"y": FP32[-1]})
        def total(x):
            return x.sum(axis=1)

    Function
        It gets one array for each input, by name, and returns a dict of arrays by output, or a tuple in the order of
        `outputs`, or the one output alone. Axis 0 counts rows: it gets a whole batch, and returns as many rows. A list of
        one array a row is allowed for an output whose rows differ in length along one axis. Its inputs are read-only; it
        must not keep them. Without `inputs` and `outputs` they are taken from annotations: `def total(x: FP32[-1, 4]) ->
        FP32[-1]` has one output, named "output".

        An `InvalidInput` that it raises is for the client. Other exceptions are INTERNAL, without their text.

    Class
        `load(self)`, if there is one, is called once for each worker before the first request, then `__call__` as a
        function is.

    Arguments
        `name` is that of the function by default. `max_batch_size` is the most rows in a batch; by default that of the
        server; 0 if tensors have no axis of rows: then each request runs alone. `workers` threads run batches at the same
        time; the function must then be thread-safe, an object of a class is not shared. `processes` child processes run
        them instead, each with its own import of the file, for functions that hold the GIL. With `batched` false the
        function takes one row, and the shapes are those of one row.

        At load the function is called up to four times, and rows that run together are compared with rows that run alone.
        If they differ, each request runs alone, and the log says so. `example` is an input for these calls, with at least
        two different rows; without it values are random. With `check` false the function is not called at load.

        `steady` says that the function computes only, and takes about as long for all inputs of the same shapes: it waits
        for nothing and calls no other model. Short batches of it then need no thread of their own.

        With `streams` true the function is a generator, or an asynchronous one, and each item that it yields is an answer of its
        own, in the forms above. Each request runs alone; the shapes are those of one request and of one answer. The
        generator goes on only when the client has room for another answer. It is closed if the client leaves. As many requests
        run at the same time as there are `workers` or `processes`.

        `pure` says that equal rows always get equal outputs, so that the option `cache` may keep them.

    Raises DeclarationError.
    """

    def declare(function: Callable[..., Any]) -> FunctionModel:
        named = str(getattr(function, "__name__", "")) if name is None else name
        hinted = ({}, {}) if inputs is not None and outputs is not None else types_of_hints(function)
        return FunctionModel(
            named,
            function,
            dict(hinted[0] if inputs is None else inputs),
            dict(hinted[1] if outputs is None else outputs),
            0 if streams and max_batch_size is None else max_batch_size,
            workers,
            processes,
            batched,
            check,
            steady,
            example,
            streams=streams,
            pure=pure,
        )

    return declare if function is None else declare(function)


def onnx(
    path: str | Path,
    *,
    name: str | None = None,
    max_batch_size: int | None = None,
    pad_lengths: tuple[str, Sequence[int]] | None = None,
    pad_values: Mapping[str, Any] | None = None,
    states: Mapping[str, str] | None = None,
) -> OnnxModel:
    """Declare an ONNX file as a model. A relative path starts at the directory of the file that declares it.

    In place of a path there can be an address, such as "hf://ORG/REPO/model.onnx"; the server fetches it when it starts.
    `name` is that of the file by default. `pad_lengths` is the name of an axis and ascending lengths: inputs of different
    lengths are padded to the next one, with the `pad_values` of each input, so that they can share a batch. `states` maps
    inputs to outputs: in a sequence of requests, an output is the input of the next one. Other settings are those of the
    server, or of the model's table in its configuration file. Raises DeclarationError.
    """
    address = address_of(path)
    file = Path(name_at(address) if address else path)
    named = name or file.name.removesuffix(".onnx")
    check_name(named)
    check_batch_size(f"model {named!r}", max_batch_size)
    lengths = None
    if pad_lengths is not None:
        lengths = checked_pad_lengths(named, pad_lengths)
    elif pad_values:
        raise DeclarationError(
            f"model {named!r} has pad_values without pad_lengths; say which axis is padded to which lengths"
        )
    return OnnxModel(
        named, file, max_batch_size, lengths, dict(pad_values or {}), address, states=dict(states or {})
    )


def address_of(path: str | Path) -> str:
    """Return the address that was given in place of a path, or an empty string."""
    return path if isinstance(path, str) and "://" in path else ""


def name_at(address: str) -> str:
    """Return the name of the file that an address is of."""
    # A query and a hash can follow it.
    return re.split("[?#]", address)[0].rpartition("/")[2]


def step(
    model: FunctionModel | OnnxModel | str,
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> Step:
    """Declare a step whose tensors have other names in the pipeline.

    `inputs` maps names of the model's inputs, and `outputs` of its outputs, to names of the pipeline's tensors. A string
    is the name of another model of the server, which the step then shares with all others that use it.
    """
    if isinstance(model, str):
        check_name(model)
    return Step(model, dict(inputs or {}), dict(outputs or {}))


def pipeline(
    name: str,
    *steps: Step | FunctionModel | OnnxModel | str,
    outputs: Sequence[str] | None = None,
    task: str | None = None,
    labels: Sequence[str] = (),
    served_as: Sequence[str] = (),
) -> PipelineModel:
    """Declare steps as one model.

        embed = pipeline("embed", tokenize, step(onnx("minilm.onnx"), inputs={"input_ids": "tokens"}), normalize)

    Every output of a step is a tensor of the pipeline, and every later step can read it by its name. What no step gives is
    an input of the pipeline. `outputs` are the names of the tensors that clients get, by default all outputs of the last
    step.

    `task` lets the text endpoints of HTTP serve a pipeline of texts. "embedding" needs an output FP32[-1, size], the
    vectors; "token_embedding" an output FP32[-1, tokens, size], the vectors of tokens, and the tokenizer's `attention_mask`;
    "rerank" an output `score`, FP32[-1]; "classify" an output `scores`, FP32[-1, labels], and `labels`; "tokenize" the output
    `token_list` of a tokenizer. Clients of the endpoints can also ask for it by the names `served_as`. Raises
    DeclarationError.
    """
    if not steps:
        raise DeclarationError(f"pipeline {name!r} has no steps; give at least one model")
    declared = []
    for each in steps:
        if not isinstance(each, (Step, FunctionModel, OnnxModel, str)):
            raise DeclarationError(
                f"a step of pipeline {name!r} is {each!r}; it must be made by model, onnx or step, or be a model's name"
            )
        declared.append(each if isinstance(each, Step) else step(each))
        used = declared[-1].model
        if isinstance(used, FunctionModel) and used.streams:
            raise DeclarationError(
                f"step {used.name!r} of pipeline {name!r} answers in streams, which only a model by itself can do; let it "
                "return its outputs, without `streams`"
            )
        if isinstance(used, OnnxModel) and used.states:
            raise DeclarationError(
                f"step {used.name!r} of pipeline {name!r} has states, which only a model by itself can have; leave them out"
            )
    if outputs is not None:
        check_outputs(name, outputs)
    if task is None and (labels or served_as):
        raise DeclarationError(f"pipeline {name!r} has labels or served_as without a task; give `task`")
    of_text = None if task is None else TextTask(task, labels, served_as)
    made = PipelineModel(name, tuple(declared), None if outputs is None else tuple(outputs), of_text)
    if (record := MADE_PIPELINES.get()) is not None:
        record.append(made)
    return made
