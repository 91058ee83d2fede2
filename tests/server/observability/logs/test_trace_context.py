"""W3C Trace Context: valid headers are parsed, others are ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.rig import reproducible

from tensorferry.server.observability.logs.trace_context import TraceContext, parse_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        # Future versions.
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what the future holds", True),
    ],
)
def test_a_valid_header_is_parsed(text: str, sampled: bool) -> None:
    context = parse_trace_context([("user-agent", "x"), ("traceparent", text), ("blob-bin", b"\0")])
    assert context == TraceContext(TRACE, SPAN, sampled)
    assert context is not None
    assert context.traceparent == f"00-{TRACE}-{SPAN}-{sampled:02x}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_malformed_headers_are_ignored(text: str) -> None:
    assert parse_trace_context([("traceparent", text)]) is None


def test_two_headers_are_ignored() -> None:
    assert parse_trace_context([("traceparent", GOOD), ("traceparent", GOOD)]) is None


def test_state_headers_are_joined_and_dropped_if_too_long() -> None:
    parent = ("traceparent", GOOD)
    both = [("tracestate", "a=1"), parent, ("tracestate", "b=2,c=3")]
    assert parse_trace_context(both) == TraceContext(TRACE, SPAN, True, "a=1,b=2,c=3")
    assert parse_trace_context([parent, ("tracestate", "a=" + "x" * 511)]) == TraceContext(TRACE, SPAN, True)
    assert parse_trace_context([("tracestate", "a=1")]) is None


@reproducible
@given(st.one_of(st.text(), st.binary(), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-.*")))
def test_invalid_headers_raise_nothing_and_are_not_logged(value: str | bytes) -> None:
    metadata: list[tuple[str, str | bytes]] = [("traceparent", value), ("tracestate", str(value))]
    context = parse_trace_context(metadata)
    if context is not None:
        assert set(context.trace_id + context.span_id) <= set("0123456789abcdef")
