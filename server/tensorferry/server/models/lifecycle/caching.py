"""Which models may keep their answers: those that give equal requests equal answers."""

from __future__ import annotations

import logging

from tensorferry.batcher import AnswerCache, Batcher, Pipeline
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.python.steps.planning import Plan
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")


def cache_of(
    source: ModelSource, plan: Plan, batcher: Batcher | Pipeline, config: ServerConfig
) -> AnswerCache | None:
    """Return the cache of a model's answers; None if it shall have none, or may have none, which is logged.

    `config` has the options of the model.
    """
    given = source.config
    asked = given is not None and given.response_cache.enable
    if given is not None and given.HasField("response_cache") and not asked:
        return None
    if not config.cache:
        if asked:
            _log.warning(
                "model %s: its configuration has response_cache, but no answer is kept; start with --cache 256MiB",
                source.name,
            )
        return None
    reason = _impurity(plan)
    if reason:
        _log.warning("model %s: --cache has no effect on it: %s", source.name, reason)
        return None
    return AnswerCache(batcher, config.cache, by_rows=_by_rows(plan.signature, batcher))


def _by_rows(signature: Signature, batcher: Batcher | Pipeline) -> bool:
    """Return whether each row of a request has outputs of its own, of the same shape.

    Rows of requests that run alone may affect each other. What optional inputs do to rows was not checked. The width of an
    output may depend on the other rows.
    """
    if isinstance(batcher, Pipeline):
        batchers = [stage.own.batcher for stage in batcher.stages if stage.own is not None]
    else:
        batchers = [batcher]
    independent = all(each.settings.max_batch_size > 0 and each.settings.merge for each in batchers)
    fixed = all(isinstance(dim, int) for spec in signature.outputs for dim in spec.dims[1:])
    return independent and fixed and not signature.optional


def _impurity(plan: Plan) -> str:
    """Return why equal requests may get different answers; "" if they cannot."""
    for placed in (step for stage in plan.stages for step in stage.steps):
        step = placed.step
        if step is None:
            return f"its step {placed.name!r} is another model, which can be replaced"
        if step.sequences is not None:
            return "it keeps states of sequences"
        if step.streams:
            return "it answers in streams"
        if step.impure:
            return step.impure
    return ""
