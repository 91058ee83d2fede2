"""Decides how a model is batched, from its configuration, the server's options and the batching check.

If the configuration does not set max_batch_size, a model with independent rows is batched as the server's options say.
If the configuration gives max_batch_size, it applies; the check then only decides whether requests may share a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision, is_complete
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings, with_time_limit
from tensorferry.server.onnx.batching.remedies import batch_axis_remedy, has_specific_remedy, remedies_for
from tensorferry.server.onnx.batching.shared_inputs import mixing_through_shared_inputs
from tensorferry.server.onnx.batching.verdict import (
    BatchingFinding,
    BatchingVerdict,
    check_batching,
    unfinished,
)
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import Run, random_inputs, working_size
from tensorferry.server.runtime.files.onnx_file import string_lists
from tensorferry.server.runtime.files.op_libraries import replacing_library
from tensorferry.server.runtime.ort_options import BATCHING
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")

POLICIES = ("proved", "tested", "trust")

# A loop in the model may never end on values such as NaN, so a run on them is stopped after this time.
_LIMIT_SECONDS = 20.0
# Most reasons named of a copy that is not batched.
_MOST_REASONS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded model whose batching is to be decided.

    `signature` and `run` follow its configuration, if it has one. `precision` and `budget` are as in `ComparisonSettings`,
    `run_alone` as in `compare_rows`.
    """

    name: str
    session: Session
    signature: Signature
    run: Run
    requested: ModelConfig | None
    server_config: ServerConfig
    precision: float
    cache: CheckCache
    budget: LoadBudget
    run_alone: Run | None = None

    @property
    def policy(self) -> str:
        """The batching policy of the model, as in `batching_policy`."""
        return batching_policy(self.requested, self.server_config)

    def unchecked(self, decision: BatchingDecision) -> Decided:
        """Return the decision and a working size."""
        return Decided(decision, working_size(self.signature, self.run)[0])

    def check(self, max_batch_size: int) -> BatchingFinding:
        """Run the batching check, unless its result is cached, and apply the policy to its finding."""
        conditions = (max_batch_size, self.signature, self.precision)
        found = BatchingFinding.from_json(self.cache.get("batching", conditions))
        if found is None or not self._runs(found.working_size):
            found = self._checked(max_batch_size)
            if found.lasting:
                self.cache.put("batching", conditions, found.to_json())
        else:
            _log.info(
                "model %s: %s, as an earlier load found: %s",
                self.name,
                found.verdict.value,
                found.evidence or found.reason,
            )
        if found.verdict is BatchingVerdict.TESTED and self.policy == "proved":
            reason = f"it is only tested, and --batching proved batches only proved models: {found.reason}"
            return replace(
                found, verdict=BatchingVerdict.REFUSED, reason=reason, remedies=remedies_for([reason])
            )
        return found

    def _runs(self, size: int | None) -> bool:
        """Return whether the model runs one row of this working size."""
        try:
            self.run(random_inputs(self.signature, 1, size or 1))
        except Exception:
            return False
        return True

    def _checked(self, max_batch_size: int) -> BatchingFinding:
        settings = ComparisonSettings(
            max_batch_size, string_lists(self.session.path), self.precision, budget=self.budget
        )
        # Less than the limit of the load, at which the model is refused.
        seconds = min(_LIMIT_SECONDS, self.server_config.run_timeout / 2 or _LIMIT_SECONDS)
        first_run = with_time_limit(self.run, self.session, seconds)
        library = replacing_library(self.session.op_libraries)
        unprovable = (
            "" if library is None else f"{library.path.name} may replace operators of the graph by its own"
        )
        found = check_batching(
            self.name,
            self.session.path,
            self.signature,
            self.run,
            settings,
            first_run,
            unprovable,
            self.run_alone,
        )
        if found.verdict is BatchingVerdict.TESTED and found.working_size is not None:
            mixing = mixing_through_shared_inputs(self.signature, self.run, settings, found.working_size)
            if mixing is None:
                return unfinished(found.reason, found.working_size, found.seconds)
            if mixing:
                remedies = remedies_for([mixing])
                return replace(
                    found, verdict=BatchingVerdict.REFUSED, reason=mixing, evidence="", remedies=remedies
                )
        return found


class Decided(NamedTuple):
    """How a model is batched, a working size, and the time of one row and of two, by rows, if they were run.

    `warning` says why requests share no batch, for the log; empty if they do.
    """

    batching: BatchingDecision
    working_size: int | None
    seconds: Mapping[int, float] = {}
    warning: str = ""


def batching_policy(config: ModelConfig | None, server_config: ServerConfig) -> str:
    """Return which models are batched: "proved", "tested" (also tested ones) or "trust" (all).

    The model's parameter `batching` precedes --batching. ModelConfigError if it has another value.
    """
    if config is None or BATCHING not in config.parameters:
        return server_config.batching
    given = config.parameters[BATCHING].string_value
    if given not in POLICIES:
        raise ModelConfigError(
            f"model {config.name!r}: parameter {BATCHING} is {given!r}; expected values for {BATCHING} are "
            f"{', '.join(POLICIES)}"
        )
    return given


def decide_by_server_config(model: Candidate, rewriting: Sequence[str] = ()) -> Decided:
    """Decide for a model whose configuration does not set max_batch_size; also return what is known of its runs.

    `rewriting` has the reasons why the model is not served from a copy with a variable batch axis, if that was tried.
    """
    name, max_batch_size = model.name, model.server_config.max_batch_size
    if max_batch_size == 0:
        return model.unchecked(_unbatched(_off("--max-batch-size 0")))
    reason = model.signature.no_batch_axis_reason()
    if reason is not None:
        remedy = batch_axis_remedy(model.signature)
        remedies = (remedy,) if remedy else remedies_for([reason])
        if rewriting:
            reason += (
                f", and no copy with a variable batch axis is proved: {'; '.join(rewriting[:_MOST_REASONS])}"
            )
            # The graph's own reasons come first, because another axis alone changes nothing.
            own = remedies_for([why for why in rewriting if has_specific_remedy(why)])
            remedies = tuple(dict.fromkeys((*own, *remedies)))
        warning = f"model {name} is served unbatched: {reason}; to have it batched: {remedies[0]}"
        unbatched = _unbatched(BatchingFinding(BatchingVerdict.OFF, reason, None, remedies=remedies))
        return model.unchecked(unbatched)._replace(warning=warning)
    if model.policy == "trust":
        return model.unchecked(_trusted(model, max_batch_size))
    found = model.check(max_batch_size)
    if found.verdict is BatchingVerdict.REFUSED:
        warning = (
            f"model {name} is served unbatched: {found.reason}; to have it batched: {'; '.join(found.remedies)} (--batching trust "
            "batches it anyway)"
        )
        return Decided(_unbatched(found), found.working_size, found.seconds, warning)
    return Decided(_batched(model, max_batch_size, found), found.working_size, found.seconds)


def decision_for_copy(model: Candidate, found: BatchingFinding) -> BatchingDecision:
    """Return the decision for a model that is served from a copy with a variable batch axis, which is proved."""
    decision = _batched(model, model.server_config.max_batch_size, found, ", rewritten")
    return replace(decision, rewritten=True)


def decide_by_model_config(model: Candidate, requested: ModelConfig) -> Decided:
    """Decide for a model whose configuration gives max_batch_size; also return what is known of its runs.

    Requests share no batch if the check finds that this changes answers.
    """
    name, max_batch_size = model.name, requested.max_batch_size
    explicit = requested.HasField("dynamic_batching")
    if max_batch_size == 0:
        return model.unchecked(_unbatched(_off("max_batch_size is 0 in its configuration")))
    if not explicit and (is_complete(requested) or max_batch_size == 1):
        if max_batch_size > 1:
            _log.info(
                "model %s: each request runs alone, as its configuration has no dynamic_batching; add "
                "'dynamic_batching { }' to let requests share batches",
                name,
            )
        reason = "its configuration has no dynamic_batching"
        return model.unchecked(_each_alone(max_batch_size, _off(reason)))
    if model.policy == "trust":
        return model.unchecked(_trusted(model, max_batch_size))
    found = model.check(max_batch_size)
    if found.verdict is not BatchingVerdict.REFUSED:
        return Decided(_batched(model, max_batch_size, found), found.working_size, found.seconds)
    if explicit and not found.conclusive and model.policy != "proved":
        _log.warning(
            "model %s is batched unchecked, because its configuration has dynamic_batching: %s",
            name,
            found.reason,
        )
        why = ", as its configuration has dynamic_batching"
        trusted = replace(found, verdict=BatchingVerdict.TRUSTED)
        return Decided(_batched(model, max_batch_size, trusted, why), None)
    _log.warning(
        "model %s: each request runs alone: %s; to change that: %s (--batching trust lets requests share batches anyway)",
        name,
        found.reason,
        "; ".join(found.remedies),
    )
    return Decided(_each_alone(max_batch_size, found), found.working_size, found.seconds)


def _off(reason: str) -> BatchingFinding:
    return BatchingFinding(BatchingVerdict.OFF, reason, None, remedies=remedies_for([reason]))


def _unbatched(found: BatchingFinding) -> BatchingDecision:
    return _decision(found, 0, False, f"unbatched ({found.reason})")


def _each_alone(max_batch_size: int, found: BatchingFinding) -> BatchingDecision:
    description = f"requests of up to {max_batch_size} rows, each alone ({found.reason})"
    return _decision(found, max_batch_size, False, description)


def _trusted(model: Candidate, max_batch_size: int) -> BatchingDecision:
    _log.warning("model %s is batched unchecked (--batching trust)", model.name)
    return _batched(model, max_batch_size, BatchingFinding(BatchingVerdict.TRUSTED, "", None))


def _batched(
    model: Candidate, max_batch_size: int, found: BatchingFinding, why: str = ""
) -> BatchingDecision:
    max_queue_delay = model.server_config.max_queue_delay
    if model.requested is not None and model.requested.HasField("dynamic_batching"):
        max_queue_delay = model.requested.dynamic_batching.max_queue_delay_microseconds / 1e6
    delay = f" after at most {max_queue_delay * 1e3:g} ms" if max_queue_delay else ""
    description = f"batches of up to {max_batch_size} rows{delay} ({found.verdict.value}{why})"
    return _decision(found, max_batch_size, True, description)


def _decision(
    found: BatchingFinding, max_batch_size: int, merges: bool, description: str
) -> BatchingDecision:
    return BatchingDecision(
        max_batch_size, merges, description, found.verdict.value, found.reason, found.evidence, found.remedies
    )
