"""How a model is batched: by the options, or as its configuration says, as far as its rows are kept apart.

The rule where a configuration leaves max_batch_size open: a model whose rows are kept apart is batched, by the
options. Where it gives one, that holds, and the verdict only says whether requests may share a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.batching_check.row_comparison import ComparisonSettings
from tensorferry.server.batching_check.shared_inputs import mixing_through_shared_inputs
from tensorferry.server.batching_check.time_limit import with_time_limit
from tensorferry.server.batching_check.verdict import BatchingFinding, BatchingVerdict, check_batching
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.model_config.pbtxt import BatchingDecision, is_complete
from tensorferry.server.runtime.onnx_file import string_lists
from tensorferry.server.runtime.ort_options import BATCHING
from tensorferry.server.runtime.sampling import Array, working_size
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")

POLICIES = ("proved", "tested", "trust")

# A run with values that the model may not be made for is ended after so long.
_LIMIT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is loaded and not yet decided on.

    `signature` and `run` are those of its configuration, where it has one; `precision` is as in `ComparisonSettings`.
    """

    name: str
    session: Session
    signature: Signature
    run: Callable[[Mapping[str, Array]], dict[str, Array]]
    asked: ModelConfig | None
    options: ServerConfig
    precision: float

    @property
    def policy(self) -> str:
        """As `batching_policy` has it."""
        return batching_policy(self.asked, self.options)

    def unchecked(self, batching: BatchingDecision) -> tuple[BatchingDecision, int | None]:
        """This decision, and a size that warms the model up."""
        return batching, working_size(self.signature, self.run)[0]

    def judged(self, most: int) -> BatchingFinding:
        """The verdict of running and of the graph, as far as the policy takes it."""
        conditions = ComparisonSettings(most, string_lists(self.session.path), self.precision)
        first_run = with_time_limit(self.run, self.session, _LIMIT_SECONDS)
        found = check_batching(self.name, self.session.path, self.signature, self.run, conditions, first_run)
        if found.verdict is BatchingVerdict.TESTED and found.size is not None:
            reason = mixing_through_shared_inputs(self.signature, self.run, conditions, found.size)
            if reason:
                return BatchingFinding(BatchingVerdict.REFUSED, reason, found.size)
        if found.verdict is BatchingVerdict.TESTED and self.policy == "proved":
            return BatchingFinding(
                BatchingVerdict.REFUSED,
                f"it is only tested, and --batching proved batches only what is proved: {found.reason}",
                found.size,
            )
        return found


def batching_policy(config: ModelConfig | None, options: ServerConfig) -> str:
    """What is batched: proved, tested (what is only tested, too) or trust (all).

    ModelConfigError when the configuration has another word.
    """
    if config is None or BATCHING not in config.parameters:
        return options.batching
    given = config.parameters[BATCHING].string_value
    if given not in POLICIES:
        raise ModelConfigError(
            f"model {config.name!r}: parameter {BATCHING} is {given!r}; expected values for {BATCHING} are "
            f"{', '.join(POLICIES)}"
        )
    return given


def by_options(model: Candidate) -> tuple[BatchingDecision, int | None]:
    """As the options say, if it is safe; and a size that warms the model up."""
    name, most, policy = model.name, model.options.max_batch_size, model.policy
    if most == 0:
        return model.unchecked(
            BatchingDecision(0, False, "unbatched (--max-batch-size 0)", BatchingVerdict.OFF.value)
        )
    lacking = model.signature.no_batch_axis_reason()
    if lacking is not None:
        _log.warning("model %s is served unbatched: %s%s", name, lacking, _cure(model.signature))
        return model.unchecked(
            BatchingDecision(0, False, f"unbatched ({lacking})", BatchingVerdict.OFF.value)
        )
    window = model.options.max_queue_delay
    if model.asked is not None and model.asked.HasField("dynamic_batching"):
        window = model.asked.dynamic_batching.max_queue_delay_microseconds / 1e6
    if policy == "trust":
        return model.unchecked(_trusted(name, most, window))
    found = model.judged(most)
    if found.verdict is BatchingVerdict.REFUSED:
        _log.warning(
            "model %s is served unbatched: %s (--batching trust batches it all the same)", name, found.reason
        )
        return BatchingDecision(0, False, f"unbatched ({found.reason})", found.verdict.value), found.size
    return _merging(most, window, found.verdict), found.size


def as_asked(model: Candidate, asked: ModelConfig) -> tuple[BatchingDecision, int | None]:
    """As the configuration says, but that requests share no batch where that is shown to change answers."""
    name, most, policy = model.name, asked.max_batch_size, model.policy
    explicit = asked.HasField("dynamic_batching")
    if most == 0:
        words = "unbatched (max_batch_size is 0 in its configuration)"
        return model.unchecked(BatchingDecision(0, False, words, BatchingVerdict.OFF.value))
    if not explicit and (is_complete(asked) or most == 1):
        if most > 1:
            _log.info(
                "model %s: each request runs alone, as its configuration has no dynamic_batching; add "
                "'dynamic_batching { }' to it to have requests share batches",
                name,
            )
        words = f"requests of up to {most} rows, each alone (its configuration has no dynamic_batching)"
        return model.unchecked(BatchingDecision(most, False, words, BatchingVerdict.OFF.value))
    window = (
        asked.dynamic_batching.max_queue_delay_microseconds / 1e6
        if explicit
        else model.options.max_queue_delay
    )
    if policy == "trust":
        return model.unchecked(_trusted(name, most, window))
    found = model.judged(most)
    if found.verdict is not BatchingVerdict.REFUSED:
        return _merging(most, window, found.verdict), found.size
    if explicit and not found.shown and policy != "proved":
        _log.warning("model %s is batched without proof, as its configuration says: %s", name, found.reason)
        return _merging(most, window, BatchingVerdict.TRUSTED, ", as its configuration says"), None
    _log.warning(
        "model %s: each request runs alone: %s (--batching trust has them share batches all the same)",
        name,
        found.reason,
    )
    words = f"requests of up to {most} rows, each alone ({found.reason})"
    return BatchingDecision(most, False, words, found.verdict.value), found.size


def _trusted(name: str, most: int, window: float) -> BatchingDecision:
    _log.warning("model %s is batched without proof (--batching trust)", name)
    return _merging(most, window, BatchingVerdict.TRUSTED)


def _merging(most: int, window: float, verdict: BatchingVerdict, why: str = "") -> BatchingDecision:
    after = f" after at most {window * 1e3:g} ms" if window else ""
    words = f"batches of up to {most} rows{after} ({verdict.value}{why})"
    return BatchingDecision(most, True, words, verdict.value)


def _cure(signature: Signature) -> str:
    """How to export a batch axis that varies, where it is fixed."""
    fixed = [
        spec.name
        for spec in (*signature.inputs, *signature.outputs)
        if spec.dims and isinstance(spec.dims[0], int)
    ]
    if not fixed:
        return ""
    axes = ", ".join(f"{name!r}: {{0: 'batch'}}" for name in fixed)
    return (
        "; to have it batched, export it with a first dimension that varies: torch.onnx.export(..., "
        f"dynamic_axes={{{axes}}}), or in other exporters a batch size of None"
    )
