"""Metadata of a server and its models, as plain records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import quoted
from tensorferry.protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output: protocol datatype, and shape with -1 for a dynamic axis.

    A request may omit an `optional` input.

    >>> print(client.metadata("digits").inputs[0])
    UINT8 [-1, 8, 8]
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


def subject_of(tensor: TensorMetadata, model: str) -> str:
    """Return the name of an input for an error message."""
    return f"input {tensor.name!r} of model {model!r}"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """One model: available versions, inputs, outputs, and the server's other properties.

    Not every server names the inputs and outputs: KServe's and MLServer's leave them empty unless
    the model's author declared them.

    >>> model = client.metadata("digits")
    >>> model.versions, [output.name for output in model.outputs]
    (('1',), ['label', 'probabilities'])
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: pb.ModelMetadataResponse) -> ModelMetadata:
        """Convert a `ModelMetadataResponse`."""
        optional = message.properties.get("optional_inputs", "").split(",")
        return cls(
            name=message.name,
            versions=tuple(message.versions),
            platform=message.platform,
            inputs=tuple(
                TensorMetadata(t.name, t.datatype, tuple(t.shape), t.name in optional) for t in message.inputs
            ),
            outputs=tuple(TensorMetadata(t.name, t.datatype, tuple(t.shape)) for t in message.outputs),
            properties={name: _text_of(value) for name, value in message.properties.items()},
        )


def check_names(model: ModelMetadata, what: str, given: Mapping[str, object]) -> None:
    """Raise InvalidInput if an input that is not optional is missing, or a given one is unknown."""
    known = {tensor.name: tensor.optional for tensor in model.inputs}
    missing = [name for name, optional in known.items() if name not in given and not optional]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        changes = [f"add {quoted(missing)}"] * bool(missing) + [f"remove {quoted(unknown)}"] * bool(unknown)
        expected, change = f"the {what} {quoted(known)}", " and ".join(changes)
        raise InvalidInput(f"model {model.name!r}", expected, quoted(given), change)


# Property of a model's metadata, and the most processes that are believed.
SERVER_PROCESSES = "server_processes"
_MOST_PROCESSES = 1024


def server_processes(model: ModelMetadata) -> int:
    """Return how many processes the model's server states; 1 if it states none, or no plausible number."""
    text = model.properties.get(SERVER_PROCESSES, "")
    number = int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 1
    return number if 1 <= number <= _MOST_PROCESSES else 1


# First bytes of an InferParameter: the tags of its bool, int64 and string.
_PARAMETER_TAGS = ("\x08", "\x10", "\x1a")


def _text_of(value: str) -> str:
    """Return a property as text, also if it is an InferParameter, which MLServer sends in this field."""
    if value.startswith(_PARAMETER_TAGS):
        try:
            parameter = pb.InferParameter.FromString(value.encode())
        except DecodeError:
            return value
        choice = parameter.WhichOneof("parameter_choice")
        return str(getattr(parameter, choice)) if choice else value
    return value


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The server: name, version, and supported protocol extensions.

    >>> "statistics" in client.server_metadata().extensions
    True
    """

    name: str
    version: str
    extensions: tuple[str, ...]

    @classmethod
    def from_message(cls, message: pb.ServerMetadataResponse) -> ServerMetadata:
        """Convert a `ServerMetadataResponse`."""
        return cls(message.name, message.version, tuple(message.extensions))


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model version in the server's repository; `reason` says why it is not READY.

    >>> [(model.name, model.state) for model in client.models()]
    [('digits', 'READY')]
    """

    name: str
    version: str
    state: str
    reason: str

    @classmethod
    def from_message(cls, message: pb.RepositoryIndexResponse) -> tuple[ModelStatus, ...]:
        """Convert a `RepositoryIndexResponse`, in the server's order."""
        # MLServer sends the name of Python's enum member: State.READY.
        return tuple(cls(m.name, m.version, m.state.removeprefix("State."), m.reason) for m in message.models)
