"""A request that takes several answers tells what waits for its end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

from support.server.rig import fp32, request, signature, spec

from tensorferry.batcher import Outcome
from tensorferry.server.inference.requests.codec import decode_request
from tensorferry.server.inference.requests.request_templates import uncached_template
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.inference.streamed_inference import StreamedInference
from tensorferry.server.models.lifecycle.model import Model


def _streamed() -> StreamedInference:
    batcher = cast(Any, SimpleNamespace(priorities=1, policies=()))
    model = Model("m", "1", signature(spec("x", "FP32", "batch", 2)), 8, "", batcher)
    message = request({"x": fp32(1, 2)})
    decoded = decode_request(message, "m", model.signature, model.batched, RegionLease(Regions()))
    match = uncached_template(model, decoded), "", b"", decoded.tensors, None
    return StreamedInference(
        lambda answer: None, match, math.inf, "", (), lambda reply: None, None, None, None
    )


def test_what_is_registered_is_called_at_the_end_or_after_it_at_once() -> None:
    pending, ends = _streamed(), list[str]()
    pending.on_over(lambda: ends.append("over"))
    assert ends == []
    pending.completed(Outcome({}))
    assert ends == ["over"]
    pending.on_over(lambda: ends.append("late"))
    assert ends == ["over", "late"]
    assert not pending.take({"x": fp32(1, 2)})
