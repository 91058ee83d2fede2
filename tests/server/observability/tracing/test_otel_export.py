"""OpenTelemetry's standard variables, and a missing extra."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.otel_export import SpanExport, sampler_of
from tensorferry.server.observability.tracing.wiring import RequestTelemetry
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


def export() -> SpanExport:
    return SpanExport(ResponseBatcher())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_TRACES_SAMPLER", "often", "OTEL_TRACES_SAMPLER is 'often'; it must be one of always_on, "),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "is '2'; it must be a share of the traces, from 0 to 1"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is 'zipkin'; it must be otlp, console or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf'; "),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "a variable OTEL_* is invalid: "),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "lzma", "the OTLP exporter does not accept the variables "),
    ],
)  # fmt: skip
def test_an_invalid_variable_is_named(
    variables: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    variables.setenv(name, value)
    if name.endswith("_ARG"):
        variables.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    with pytest.raises(StartError) as caught:
        export()
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_variables_can_disable_opentelemetry(variables: pytest.MonkeyPatch, name: str, value: str) -> None:
    variables.setenv(name, value)
    # An empty variable counts as missing.
    variables.setenv("OTEL_PROPAGATORS", "")
    off = export()
    assert off.source is None
    assert off.stop(0)


def test_the_protocol_of_traces_precedes_that_of_all_signals(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    variables.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    on = export()
    assert on.source is not None
    assert on.stop(PATIENCE)


def test_a_missing_extra_is_named(variables: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("opentelemetry", "tensorferry.server.observability.tracing.otel")):
            variables.delitem(sys.modules, name)
    variables.setitem(sys.modules, "opentelemetry", None)
    telemetry = RequestTelemetry(ServerConfig((), otel=True), ResponseBatcher())
    with pytest.raises(
        StartError, match=r"--otel is given, but opentelemetry.* is not installed: pip install"
    ):
        telemetry.start()


def test_a_sampler_follows_the_parent_if_it_is_named_so() -> None:
    sampled, not_sampled = (TraceContext("1" * 32, "1" * 16, flag) for flag in (True, False))
    parents = (None, sampled, not_sampled)
    for name, expected in (
        ("", [True, True, False]),
        ("always_on", [True, True, True]),
        ("parentbased_always_off", [False, True, False]),
    ):
        sample = sampler_of({"OTEL_TRACES_SAMPLER": name})
        assert [sample(parent) is not None for parent in parents] == expected, name


@pytest.mark.parametrize("name", ["traceidratio", "parentbased_traceidratio"])
def test_a_ratio_samples_that_share_by_trace_id(name: str) -> None:
    sample = sampler_of({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": "0.25"})
    ids = [trace_id for _ in range(20_000) if (trace_id := sample(None)) is not None]
    assert 4_500 < len(ids) < 5_500
    assert len(set(ids)) == len(ids)
    # Every SDK decides the same for a trace.
    assert all(trace_id & (1 << 64) - 1 < 1 << 62 for trace_id in ids)
    if name == "traceidratio":
        low, high = "0" * 16 + "1" * 16, "f" * 32
        parents: Any = [
            TraceContext(trace_id, "1" * 16, sampled) for trace_id in (low, high) for sampled in (True, False)
        ]
        assert [sample(parent) is not None for parent in parents] == [True, True, False, False]
