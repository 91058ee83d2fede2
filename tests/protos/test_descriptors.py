"""The wire contract equals the protocol: every message, field and method is that of tritonclient's
stubs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service

from tensorferry.protos import inference_pb2, model_config_pb2

# The Open Inference Protocol has this field, Triton does not.
ONLY_OURS = {("field", "ModelMetadataResponse", "properties")}


def described(file: Any) -> dict[tuple[str, ...], Any]:
    """Return every declaration of a file that affects the wire, by kind and name."""
    facts: dict[tuple[str, ...], Any] = {}
    for name, message in file.message_types_by_name.items():
        facts.update(of_message(name, message))
    for name, enum in file.enum_types_by_name.items():
        facts["enum", name] = {value.name: value.number for value in enum.values}
    for name, service in file.services_by_name.items():
        for method in service.methods:
            facts["method", service.full_name, method.name] = (
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            )
        facts["service", name] = service.full_name
    return facts


def of_message(name: str, message: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    # The map's entry message has the option; its fields, keys and values are compared too.
    yield (
        ("message", name),
        (message.full_name, message.GetOptions().map_entry, sorted(message.oneofs_by_name)),
    )
    for field in message.fields:
        yield (
            ("field", name, field.name),
            {
                "number": field.number, "type": field.type, "repeated": field.is_repeated,
                "required": field.is_required, "presence": field.has_presence, "packed": field.is_packed,
                "json": field.json_name, "oneof": field.containing_oneof and field.containing_oneof.name,
                "message": field.message_type and field.message_type.full_name,
                "enum": field.enum_type and field.enum_type.full_name,
                "default": None if field.is_repeated else field.default_value,
            },
        )  # fmt: skip
    for enum_name, enum in message.enum_types_by_name.items():
        yield ("enum", f"{name}.{enum_name}"), {value.name: value.number for value in enum.values}
    for nested_name, nested in message.nested_types_by_name.items():
        if (("field", name, "properties") in ONLY_OURS) and nested_name == "PropertiesEntry":
            continue
        yield from of_message(f"{name}.{nested_name}", nested)


PAIRS = {
    "service": (inference_pb2.DESCRIPTOR, triton_service.DESCRIPTOR),
    "model config": (model_config_pb2.DESCRIPTOR, triton_config.DESCRIPTOR),
}


@pytest.mark.parametrize("file", PAIRS)
def test_every_declaration_is_the_protocols(file: str) -> None:
    ours, theirs = map(described, PAIRS[file])
    assert {key: fact for key, fact in ours.items() if key not in ONLY_OURS} == theirs
    assert (file == "service") == (ours.keys() >= ONLY_OURS)


def test_the_comparison_is_of_something() -> None:
    facts = described(inference_pb2.DESCRIPTOR)
    assert facts["field", "ModelInferRequest", "raw_input_contents"]["number"] == 7
    assert facts["field", "ModelMetadataResponse", "properties"]["number"] == 6
    assert facts["method", "inference.GRPCInferenceService", "ModelStreamInfer"][2:] == (True, True)
    assert sum(key[0] == "method" for key in facts) == 20
    assert any(key[0] == "enum" for key in described(model_config_pb2.DESCRIPTOR))
