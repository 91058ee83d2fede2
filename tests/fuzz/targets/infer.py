"""Bytes of ModelInfer: the path through a request template must answer like the full decoding, and
both rightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.target import ANSWERED, Asked, Counted, FindingError, Shape, Target, code_of, timed
from fuzz.world import WORDS, World, requests
from support.server.rig import fp32, request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, decode_contents, decode_raw
from tensorferry.server.inference.requests.request_templates import Match, RequestTemplateCache
from tensorferry.server.inference.service import InferenceService

_EXPLAINED = (
    "batch_number", "batch_requests", "batch_rows", "full_batch_rows", "position", "queue_us", "compute_us", "predicted_us", "close_reason",
)  # fmt: skip


class Forgetful(RequestTemplateCache):
    """A cache that keeps nothing, so every message is decoded in full."""

    def find(self, data: bytes, generation: int) -> Match | None:
        return None


class InferTarget(Target):
    """Each input is sent once to a service that decodes in full, and twice to one with templates.

    A good request with its own values is in the same batch, and must get these back.
    """

    name = "infer"
    words: Sequence[str] = WORDS

    def __init__(self, directory: Path) -> None:
        self._world = World(directory)
        self._world.register()
        self._plain = InferenceService(self._world.registry, regions=self._world.regions)
        self._plain._templates = Forgetful()
        self._known = InferenceService(self._world.registry, regions=self._world.regions)
        self._counted = Counted()
        self._neighbours = 0

    def seeds(self) -> Sequence[bytes]:
        return [message.SerializeToString(deterministic=True) for message in requests()]

    def shape(self, data: bytes) -> Shape:
        return Shape(b"", pb.ModelInferRequest)

    def run(self, data: bytes) -> str:
        shared = b"shared_memory" in data
        results = []
        with timed():
            for service in (self._plain, self._known, self._known):
                if shared:
                    self._world.fill()
                asked = self._counted.ask(service, data)
                # These run beside a request that waits for its batch, and sometimes beside a refused one.
                if service is self._plain and (asked.reply is None or self._counted.asked % 16 == 0):
                    self._check_neighbour(service)
                results.append(self._result(asked))
                if shared:
                    self._world.check()
        plain, *known = results
        for other in known:
            # Whether a timeout of microseconds is met is chance.
            if other != plain and "DEADLINE_EXCEEDED" not in (other[0], plain[0]):
                raise FindingError(f"through a remembered form: {other}; decoded: {plain}")
        code, said = plain
        if code == ANSWERED:
            _check_answer(pb.ModelInferRequest.FromString(data), said, shared)
        return code

    def _result(self, asked: Asked) -> tuple[str, Any]:
        reply = asked.wait()
        try:
            message = reply.message()
        except Exception as error:
            text = str(error)
            return code_of(error), text
        response = pb.ModelInferResponse.FromString(message)
        if response.id != reply.request_id:
            raise FindingError(f"the answer to {reply.request_id!r} has the id {response.id!r}")
        for name in _EXPLAINED:
            response.parameters.pop(name, None)
        return ANSWERED, response

    def _check_neighbour(self, service: InferenceService) -> None:
        self._neighbours += 1
        values = fp32(1, 3) + self._neighbours % 1000
        good = request({"x": values, "n": np.array([[self._neighbours]])}, model="numbers", id="good")
        code, answer = self._result(self._counted.ask(service, good.SerializeToString()))
        if code != ANSWERED or list(answer.raw_output_contents) != list(good.raw_input_contents):
            raise FindingError(f"a good request beside it was answered with {code}: {answer}")

    def check(self) -> None:
        self._counted.check()
        self._world.check()

    def close(self) -> None:
        self._world.close()


def _check_answer(sent: pb.ModelInferRequest, answer: pb.ModelInferResponse, shared: bool) -> None:
    """Check the answer: the models copy, so the values must be those sent."""
    if (answer.model_name, answer.id) != (sent.model_name, sent.id):
        raise FindingError(f"an answer of {answer.model_name!r} to {answer.id!r}")
    wanted = [output.name for output in sent.outputs] or [
        f"{tensor.name}_out" for tensor in answer_order(sent)
    ]
    if [output.name for output in answer.outputs] != wanted:
        raise FindingError(f"the outputs {[o.name for o in answer.outputs]}, wanted were {wanted}")
    if shared or any(output.parameters for output in sent.outputs):
        return
    given = values_of(sent.inputs, sent.raw_input_contents)
    for name, value in values_of(answer.outputs, answer.raw_output_contents).items():
        if value != given[name.removesuffix("_out")]:
            raise FindingError(f"output {name} is {value}, sent was {given[name.removesuffix('_out')]}")


def answer_order(sent: pb.ModelInferRequest) -> list[Any]:
    """Return the inputs in the model's order, which is the order of its outputs."""
    from fuzz.world import KINDS, NUMBERS, STRINGS, TOKENS

    specs = {"numbers": NUMBERS, "strings": STRINGS, "alone": KINDS, "tokens": TOKENS}[sent.model_name]
    by_name = {tensor.name: tensor for tensor in sent.inputs}
    return [by_name[each.name] for each in specs]


def values_of(tensors: Any, raws: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return shape and contents of each tensor, equal for raw and typed ones, for padded BOOL and for
    NaN.
    """
    found = {}
    for index, tensor in enumerate(tensors):
        kind = DATATYPES[tensor.datatype]
        if raws:
            array = decode_raw(raws[index], kind, tensor.shape)
        else:
            array = decode_contents(tensor.contents, kind, tensor.shape)
        data = b"\0".join(array.reshape(-1).tolist()) if kind.name == "BYTES" else array.tobytes()
        if kind.name == "BOOL" and not tensor.name.endswith("_out"):
            # The server takes each byte of an input other than 0 as true.
            data = (array.view(np.uint8) != 0).tobytes()
        found[tensor.name] = tuple(tensor.shape), data
    return found
