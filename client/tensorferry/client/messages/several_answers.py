"""Requests that are part of an exchange: of models that answer in streams, and of sequences."""

from __future__ import annotations

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.protos import inference_pb2 as pb

# Parameter of a request that asks for an answer without outputs after the last one. The name is Triton's.
_EMPTY_FINAL = "triton_enable_empty_final_response"
# Parameter that is false in an answer before the last one.
_FINAL = "triton_final_response"
# Property of a model's metadata.
_STREAMS = "streams"
# Prefix of the parameters of sequence requests, whose model keeps state between requests.
_SEQUENCE = "sequence_"


def gives_several(metadata: ModelMetadata) -> bool:
    """Return whether a model answers in streams."""
    return metadata.properties.get(_STREAMS) == "true"


def take_several(request: pb.ModelInferRequest, metadata: ModelMetadata) -> None:
    """Ask to be told of the last answer, if the model answers in streams.

    Raises InvalidInput for a request of a sequence, because such a request has one answer.
    """
    if gives_several(metadata):
        if of_sequence(request):
            expected = "requests without a sequence, because it answers in streams"
            raise InvalidInput(f"model {metadata.name!r}", expected, "one of a sequence", "call stream()")
        request.parameters[_EMPTY_FINAL].bool_param = True


def takes_several(request: pb.ModelInferRequest) -> bool:
    """Return whether a request takes several answers, and is told of the last one."""
    return _EMPTY_FINAL in request.parameters


def is_last(answer: pb.ModelInferResponse) -> bool:
    """Return whether an answer is the last one to its request."""
    return _FINAL not in answer.parameters or answer.parameters[_FINAL].bool_param


def of_sequence(request: pb.ModelInferRequest) -> bool:
    """Return whether a request is one step of a sequence."""
    return any(name.startswith(_SEQUENCE) for name in request.parameters)
