"""Serving of a class `TritonPythonModel` as a function: its requests are made of a batch, and its responses joined to one."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.server.errors import (
    AlreadyExistsError,
    NotFoundError,
    NotReadyError,
    StartError,
    StepFailedError,
    UnsupportedError,
)
from tensorferry.server.models.config_pbtxt.pbtxt import datatype_of, is_complete
from tensorferry.server.python.functions.answers import Answers
from tensorferry.server.python.functions.app_file import import_module
from tensorferry.server.python.functions.call import RequestFacts, facts_of_requests, requests_of
from tensorferry.server.python.functions.failure import text_of, traceback_text
from tensorferry.server.python.triton import backend_utils
from tensorferry.server.python.triton.backend_utils import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    Tensor,
    TritonError,
    TritonModelException,
)
from tensorferry.server.python.triton.sent_answers import SentAnswers
from tensorferry.serving import DeclarationError, FunctionModel, InvalidInput
from tensorferry.serving.tensor_types import TensorType

_log = logging.getLogger("tensorferry.server")

CLASS = "TritonPythonModel"
_MODULE = "triton_python_backend_utils"
# Of a request that no client has sent.
_NO_FACTS = RequestFacts("", {})

# What a client gets for an error of a response. Others are INTERNAL.
_ERRORS: Mapping[int, type[Exception]] = {
    TritonError.NOT_FOUND: NotFoundError,
    TritonError.INVALID_ARG: InvalidInput,
    TritonError.UNAVAILABLE: NotReadyError,
    TritonError.UNSUPPORTED: UnsupportedError,
    TritonError.ALREADY_EXISTS: AlreadyExistsError,
}


def is_triton_model(path: Path) -> bool:
    """Return whether a Python file has the class of Triton's Python backend: defined, assigned, or imported by its name."""
    return CLASS in _bound_names(_parsed(path))


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds, also within `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias():
                yield child.asname or child.name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case _:
                yield from _bound_names(child)


def triton_model(
    name: str, version: str, path: Path, given: pb.ModelConfig | None
) -> tuple[FunctionModel, pb.ModelConfig]:
    """Return the declaration of a `model.py` of Triton's Python backend, and its configuration. StartError says what it lacks.

    `given` is its config.pbtxt; without one, the class must have `auto_complete_config`.
    """
    _check_names(path)
    sys.modules.setdefault(_MODULE, backend_utils)
    kind = getattr(import_module(path), CLASS, None)
    if not callable(getattr(kind, "execute", None)):
        raise StartError(f"{path}: class {CLASS} has no method execute, or is not defined by the import")
    given = given or pb.ModelConfig()
    config = _completed(kind, given, name, path)
    if not config.input or not config.output:
        raise StartError(
            f"{path}: model {name!r} has no inputs and outputs; give it a config.pbtxt with both, or a method auto_complete_config"
        )
    if optional := [each.name for each in config.input if each.optional]:
        raise StartError(
            f"{path}: model {name!r} has `optional: true` for {', '.join(optional)}, which this server has for ONNX models only; "
            "leave it out, and let clients send all inputs"
        )
    decoupled = config.model_transaction_policy.decoupled
    try:
        declared = FunctionModel(
            name,
            partial(_Instance, kind, config, _arguments(name, version, path, config)),
            _types(config.input, config),
            _types(config.output, config),
            0 if decoupled else config.max_batch_size,
            check=False,
            streams=decoupled,
            takes_requests=True,
        )
    except DeclarationError as error:
        raise StartError(f"{path}: {error}") from None
    return declared, _served(given, config)


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # The import says more.
        return ast.Module([], [])


def _check_names(path: Path) -> None:
    """Raise StartError for a name of Triton's module, or of its requests, that this server does not have.

    Of requests are looked at those that a loop over the argument of `execute` names.
    """
    nodes = list(ast.walk(_parsed(path)))
    imports = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
    modules = {each.asname or each.name for each in imports if each.name == _MODULE}
    for where, name in _attributes(nodes, modules):
        if not hasattr(backend_utils, name):
            raise StartError(f"{path}:{where}: this server's {_MODULE} has no {name}; do without it")
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    arguments = {each.args.args[1].arg for each in functions if each.name == "execute" and each.args.args[1:]}
    for function in functions:
        # Of another function, the same name may mean something else.
        inside = list(ast.walk(function))
        for where, name in _attributes(inside, set(_names_of_requests(inside, arguments))):
            if not hasattr(InferenceRequest, name):
                raise StartError(f"{path}:{where}: requests have no {name} in this server; do without it")


def _attributes(nodes: Iterable[ast.AST], names: Set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each attribute of what has one of these names."""
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name(name), attribute) if name in names:
                yield node.lineno, attribute


def _names_of_requests(nodes: Iterable[ast.AST], arguments: Set[str]) -> Iterator[str]:
    """Yield the names of single requests in loops over one of the arguments of `execute`."""
    for node in nodes:
        match node:
            case ast.For(ast.Name(name), ast.Name(looped)) | ast.comprehension(
                ast.Name(name), ast.Name(looped)
            ):
                if looped in arguments:
                    yield name


def _completed(kind: Any, given: pb.ModelConfig, name: str, path: Path) -> pb.ModelConfig:
    """Return the configuration as `auto_complete_config` of the class completes it."""
    config = deepcopy(given)
    config.name = config.name or name
    complete = getattr(kind, "auto_complete_config", None)
    if complete is not None:
        try:
            complete(_Completing(config))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # SystemExit too, which would end the thread that loads without an answer.
            raise StartError(f"{path}: auto_complete_config failed:\n{traceback_text(error)}") from None
    return config


def _served(given: pb.ModelConfig, completed: pb.ModelConfig) -> pb.ModelConfig:
    """Return what is given, as the class has changed it. Requests of a decoupled model share no batch, so its rows are an axis."""
    config = deepcopy(given)
    if is_complete(config) and completed.HasField("dynamic_batching"):
        config.dynamic_batching.CopyFrom(completed.dynamic_batching)
    config.max_batch_size = completed.max_batch_size
    if completed.model_transaction_policy.decoupled and config.max_batch_size:
        config.max_batch_size = 0
        tensors: list[Any] = [*config.input, *config.output]
        for tensor in tensors:
            tensor.dims.insert(0, -1)
    return config


def _types(tensors: Iterable[Any], config: pb.ModelConfig) -> Mapping[str, TensorType]:
    rows = (-1,) if config.max_batch_size else ()
    return {each.name: TensorType(datatype_of(each.data_type), (*rows, *each.dims)) for each in tensors}


def _arguments(name: str, version: str, path: Path, config: pb.ModelConfig) -> Mapping[str, str]:
    """Return what `initialize` gets."""
    return {
        "model_config": json.dumps(config_as_dict(config)),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{name}_0",
        "model_instance_device_id": "0",
        "model_repository": str(path.parent.parent),
        "model_version": version,
        "model_name": name,
    }


class _Completing:
    """The configuration, as `auto_complete_config` gets it."""

    def __init__(self, config: pb.ModelConfig) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return config_as_dict(self._config)

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add(self._config.input, tensor)

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add(self._config.output, tensor)

    def set_max_batch_size(self, size: int) -> None:
        self._config.max_batch_size = size

    def set_dynamic_batching(self) -> None:
        self._config.dynamic_batching.SetInParent()

    def set_model_transaction_policy(self, policy: Mapping[str, Any]) -> None:
        self._config.model_transaction_policy.decoupled = bool(policy.get("decoupled"))

    @staticmethod
    def _add(tensors: Any, tensor: Mapping[str, Any]) -> None:
        if all(known.name != tensor["name"] for known in tensors):
            datatype = pb.DataType.Value(tensor["data_type"])
            added = tensors.add(name=tensor["name"], data_type=datatype, dims=tensor["dims"])
            if tensor.get("optional"):
                added.optional = True


def config_as_dict(config: pb.ModelConfig) -> dict[str, Any]:
    """Return a configuration as `json.loads(args["model_config"])` has it, with dimensions as numbers."""
    found = MessageToDict(config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for tensor in (*found.get("input", ()), *found.get("output", ())):
        tensor["dims"] = [int(dim) for dim in tensor["dims"]]
    return dict(found)


class _Instance:
    """One object of the class. See `FunctionModel.takes_requests`."""

    def __init__(self, kind: Any, config: pb.ModelConfig, arguments: Mapping[str, str]) -> None:
        self._name = arguments["model_name"]
        self._outputs = [output.name for output in config.output]
        self._arguments = arguments
        self._model = kind()

    def load(self) -> None:
        """Call `initialize`."""
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(self._arguments))

    def close(self) -> None:
        """Call `finalize`. What it raises is logged, and the model is unloaded."""
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException as error:
                # A load that failed, which is reported by itself.
                error.__context__ = None
                _log.warning(
                    "model %s: finalize raised; the model is unloaded without the rest of it:\n%s",
                    self._name,
                    traceback_text(error),
                )

    def run(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> Mapping[str, Any]:
        """Run a batch. `rows` has the rows of each request; without any, the batch is one request."""
        parts = requests_of(inputs, rows)
        facts = chain(facts_of_requests.get()(), repeat(_NO_FACTS))
        requests = [self._request(part, each) for part, each in zip(parts, facts, strict=False)]
        responses = self._executed(requests)
        count = 0 if responses is None else len(responses)
        if count != len(requests):
            raise self._failed(f"execute returned {count} responses to {len(requests)} requests")
        if count > 1 and any(response.has_error() for response in responses):
            # They run again alone, because some errors would be those of all requests of a batch.
            raise self._failed("a response of the batch has an error")
        outputs = [self._arrays(response) for response in responses]
        if len(outputs) == 1:
            return outputs[0]
        for response, expected in zip(outputs, rows, strict=True):
            for name, array in response.items():
                # Otherwise a request would get rows of its neighbour.
                if array.shape[:1] != (expected,):
                    raise self._failed(
                        f"output {name!r} of a response has the shape {list(array.shape)}; its request has {expected} rows"
                    )
        return {name: np.concatenate([each[name] for each in outputs]) for name in self._outputs}

    def answers(self, inputs: Mapping[str, Any]) -> Answers:
        """Return the responses of a decoupled model to one request, which it may send from any thread."""
        facts = next(iter(facts_of_requests.get()()), _NO_FACTS)

        def execute(sender: InferenceResponseSender) -> None:
            returned = self._executed([self._request(inputs, facts, sender)])
            if returned is not None:
                raise self._failed(
                    f"execute returned an object of type {type(returned).__name__}; that of a decoupled model must send its "
                    "responses by get_response_sender(), and return None"
                )

        return SentAnswers(self._name, execute, self._arrays)

    def _request(
        self,
        inputs: Mapping[str, Any],
        facts: RequestFacts,
        sender: InferenceResponseSender | None = None,
    ) -> InferenceRequest:
        # Copies, because models may write to their inputs.
        tensors = [Tensor(name, np.array(array)) for name, array in inputs.items()]
        outputs, model = self._outputs, self._name
        return InferenceRequest(
            inputs=tensors,
            requested_output_names=outputs,
            model_name=model,
            request_id=facts.id,
            parameters=facts.parameters,
            response_sender=sender,
        )

    def _executed(self, requests: list[InferenceRequest]) -> Any:
        try:
            responses = self._model.execute(requests)
            return asyncio.run(responses) if inspect.iscoroutine(responses) else responses
        except TritonModelException as error:
            raise self._failed(text_of(error), traceback_text(error)) from None

    def _failed(self, message: str, details: str = "") -> StepFailedError:
        """Return an error whose text the client gets, as Triton's clients do."""
        text = f"model {self._name!r} failed on this request: {message}"
        return StepFailedError(text, message, details)

    def _arrays(self, response: InferenceResponse) -> Mapping[str, Any]:
        error = response.error()
        if error is not None:
            kind = _ERRORS.get(error.code())
            raise self._failed(error.message()) if kind is None else kind(error.message())
        found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if missing := [name for name in self._outputs if name not in found]:
            raise self._failed(f"the response has no output {', '.join(missing)}")
        return {name: found[name] for name in self._outputs}
