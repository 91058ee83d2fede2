"""What a server says about itself and its models, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorferry.protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output: its datatype's protocol name and its shape, -1 for a free size.

    A request may leave out an `optional` input.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """One model: the versions that are there, its inputs and outputs, and what else the server says of it."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: pb.ModelMetadataResponse) -> ModelMetadata:
        """The record of a `ModelMetadataResponse`."""
        optional = message.properties.get("optional_inputs", "").split(",")
        return cls(
            name=message.name,
            versions=tuple(message.versions),
            platform=message.platform,
            inputs=tuple(
                TensorMetadata(t.name, t.datatype, tuple(t.shape), t.name in optional) for t in message.inputs
            ),
            outputs=tuple(TensorMetadata(t.name, t.datatype, tuple(t.shape)) for t in message.outputs),
            properties=dict(message.properties),
        )


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The server: its name, its version, and the protocol extensions that it speaks."""

    name: str
    version: str
    extensions: tuple[str, ...]

    @classmethod
    def from_message(cls, message: pb.ServerMetadataResponse) -> ServerMetadata:
        """The record of a `ServerMetadataResponse`."""
        return cls(message.name, message.version, tuple(message.extensions))


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One version of a model in the server's repository; `reason` says why it is not READY."""

    name: str
    version: str
    state: str
    reason: str

    @classmethod
    def from_message(cls, message: pb.RepositoryIndexResponse) -> tuple[ModelStatus, ...]:
        """The records of a `RepositoryIndexResponse`, in the server's order."""
        return tuple(cls(m.name, m.version, m.state, m.reason) for m in message.models)
