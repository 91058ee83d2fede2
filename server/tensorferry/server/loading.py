"""Loads a model: sessions, batching and padding proof, warm-up, batcher."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tensorferry.batcher import Batcher, Padding, RunTimedOut
from tensorferry.server.classification import read_labels
from tensorferry.server.condition import Condition
from tensorferry.server.config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.models import Model
from tensorferry.server.padding import padding_of, prove_padding
from tensorferry.server.preparation import Prepared, prepare
from tensorferry.server.proof import Array, sample, varies
from tensorferry.server.recovery import Survivor
from tensorferry.server.session import Session
from tensorferry.server.signature import Signature
from tensorferry.server.steady import is_steady
from tensorferry.server.warmup import WarmUpSample, warm_up_samples
from tensorferry.server.watchdog import Watchdog

_log = logging.getLogger("tensorferry.server")

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def load_model(
    source: ModelSource,
    config: ServerConfig,
    device: str,
    watchdog: Watchdog | None = None,
    *,
    changed: Callable[[Condition], None] = lambda condition: None,
    lost: Callable[[str], None] = lambda reason: None,
) -> Model:
    """The model, proved, warm and ready to take requests. StartError names file and reason.

    Without a `watchdog` nothing looks after runs that hang. `changed` and `lost` are as in `Condition`.
    """
    started = time.monotonic()
    prepared = prepare(source, config, device)
    settings, signature, size = prepared.settings, prepared.contract.signature, prepared.size
    samples, left_out = warm_up_samples(prepared.config, signature, source.directory)
    for warning in left_out:
        _log.warning("%s", warning)
    declared = _declared_padding(prepared, config)
    contract, options = prepared.contract, settings.session
    padding = _decide_padding(source.name, prepared, contract.runner(prepared.session.run), config, declared)
    words = prepared.batching.words
    ladder: list[Mapping[str, int]] = [{}]
    if padding is not None and config.pad_lengths is not None:
        axis, lengths = config.pad_lengths
        ladder = [{axis: length} for length in lengths]
        words += f", padded along {axis!r} to {', '.join(map(str, lengths))}"

    # These live as long as the model, and must not hold its first session, nor `prepared`, which does.
    def warm(session: Session) -> list[dict[int, float]]:
        run = contract.runner(session.run)
        _run_samples(source.name, run, samples)
        return [
            _warm_up(source.name, signature, run, settings.max_batch_size, size, sizes) for sizes in ladder
        ]

    def rebuilt(place: str) -> Callable[[], Session]:
        def rebuild() -> Session:
            session = Session(source.path, place, options)
            if any(runs) and not any(warm(session)):
                raise StartError(f"model {source.name!r} does not run on {place} any more")
            return session

        return rebuild

    condition = Condition(source.name, source.version, len(settings.devices), changed, lost)
    survivors: list[Survivor] = []
    for index, place in enumerate(settings.devices):
        began = time.monotonic()
        # Each instance has the model's weights of its own.
        session = Session(source.path, place, options) if index else prepared.session
        runs = warm(session)
        took = time.monotonic() - (began if index else started)
        survivors.append(
            Survivor(session, rebuilt(place), condition, index, watchdog, limit=config.run_timeout, took=took)
        )
    warmed = runs[-1]
    _log.info(
        "model %s loaded from %s on %s in %.2f s, warmed at batches of %s",
        source.name,
        source.path,
        _places(settings.devices),
        time.monotonic() - started,
        ", ".join(map(str, warmed)) or "no size: it does not run on random input",
    )
    on_gpus = "cpu" not in settings.devices
    batcher = Batcher(
        [contract.runner(survivor.run) for survivor in survivors],
        settings.max_batch_size,
        settings.max_queue_delay,
        preferred_batch_sizes=settings.preferred_batch_sizes if settings.merges else (),
        priority_weights=settings.priority_weights,
        default_priority=settings.default_priority,
        strict_priorities=settings.strict_priorities,
        policies=settings.policies,
        merge=settings.merges or not settings.max_batch_size,
        max_queue_size=config.max_queue_size,
        max_queue_bytes=config.max_queue_bytes,
        # The host has hands free while a GPU computes; on the CPU both would share the cores.
        pipelined=on_gpus,
        steady=not on_gpus and is_steady(source.path),
        name=source.name,
    )
    for index, survivor in enumerate(survivors):
        survivor.give_up = _giving_up(weakref.ref(batcher), index)
    if padding is not None and size is not None:
        for sizes, run in zip(ladder, runs, strict=True):
            inputs = sample(signature, 1, size, sizes=sizes)
            key = tuple(inputs[spec.name].shape[1:] for spec in signature.inputs)
            for rows, seconds in run.items():
                batcher.anchor(rows, seconds, key)
    elif not varies(signature):
        for rows, seconds in warmed.items():
            batcher.anchor(rows, seconds)
    slo = config.slo or math.inf
    _warn_of_unreachable_batches(source.name, signature, settings.max_batch_size, warmed, slo, config)
    return Model(
        source.name,
        source.version,
        signature,
        settings.max_batch_size,
        words,
        batcher,
        slo,
        padding,
        prepared.config,
        read_labels(source.config, source.directory),
        condition,
    )


def _giving_up(batcher: weakref.ref[Batcher], instance: int) -> Callable[[RunTimedOut], None]:
    """Weakly: the batcher has the instance already, and an unloaded model must be freed at once."""

    def give_up(error: RunTimedOut) -> None:
        if (found := batcher()) is not None:
            found.give_up(instance, error)

    return give_up


def _places(devices: tuple[str, ...]) -> str:
    return ", ".join(
        place if count == 1 else f"{count} × {place}" for place, count in Counter(devices).items()
    )


def _warn_of_unreachable_batches(
    name: str,
    signature: Signature,
    max_batch_size: int,
    warmed: Mapping[int, float],
    slo: float,
    config: ServerConfig,
) -> None:
    """Says which limits keep batches from ever being full. The batcher says it of its own."""
    in_time = [rows for rows, seconds in warmed.items() if seconds < slo]
    if warmed and len(in_time) < len(warmed):
        _log.warning(
            "model %s: a batch of %d rows took %.1f ms in warm-up, and --slo-ms is %g: batches will have at most %d rows",
            name,
            max(warmed),
            warmed[max(warmed)] * 1e3,
            slo * 1e3,
            max(in_time, default=0),
        )
    if not varies(signature) and max_batch_size:
        row = sum(
            math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size
            for spec in signature.inputs
        )
        if row * max_batch_size > config.max_queue_bytes:
            _log.warning(
                "model %s: a row has %d bytes, so a batch of %d rows never fits --max-queue-bytes, %d: raise that",
                name,
                row,
                max_batch_size,
                config.max_queue_bytes,
            )


def _declared_padding(prepared: Prepared, config: ServerConfig) -> Padding | None:
    if config.pad_lengths is None:
        return None
    try:
        return padding_of(prepared.contract.signature, config.pad_lengths, dict(config.pad_values))
    except StartError as error:
        raise StartError(f"{prepared.session.path}: {error}") from None


def _decide_padding(
    name: str, prepared: Prepared, run: _Run, config: ServerConfig, declared: Padding | None
) -> Padding | None:
    """The padding, if it was asked for and is safe."""
    if declared is None or config.pad_lengths is None:
        return None
    if not prepared.settings.merges:
        how = "served unbatched" if not prepared.settings.max_batch_size else "not batched"
        _log.warning("model %s is not padded: it is %s, so nothing shares a batch", name, how)
        return None
    if config.batching == "trust":
        _log.warning("model %s is padded without proof (--batching trust)", name)
        return declared
    reason = prove_padding(
        prepared.contract.signature, run, declared, config.pad_lengths.axis, prepared.size or 1
    )
    if reason:
        _log.warning(
            "model %s is not padded, each length has batches of its own: %s (--batching trust pads it all the same)",
            name,
            reason,
        )
        return None
    return declared


def _run_samples(name: str, run: _Run, samples: list[WarmUpSample]) -> None:
    """Runs the samples of the model's configuration; StartError for one that fails."""
    for given in samples:
        for _ in range(given.count):
            try:
                run(given.inputs)
            except ModelFailedError as error:
                raise StartError(
                    f"model {name!r}: failed to run warmup sample {given.name!r}: {error}"
                ) from error


def _warm_up(
    name: str,
    signature: Signature,
    run: _Run,
    max_batch_size: int,
    size: int | None,
    sizes: Mapping[str, int],
) -> dict[int, float]:
    """Runs each power of two of rows, and the most, and times it: the first run of a size is slow.

    `size` and `sizes` are of the other dimensions that vary, as in `sample`. Returns the seconds of
    a run after the first by the rows; it ends at one that fails, as
    random rows may, or too many for the memory.
    """
    if size is None:
        return {}
    counts = sorted(
        {min(1 << power, max_batch_size or 1) for power in range(max(1, max_batch_size).bit_length() + 1)}
    )
    seconds: dict[int, float] = {}
    for rows in counts:
        inputs: Mapping[str, Any] = sample(signature, rows, size, sizes=sizes)
        try:
            run(inputs)
            seconds[rows] = min(_timed(run, inputs) for _ in range(2))
        except ModelFailedError as error:
            _log.warning("model %s: warm-up ended at a batch of %d rows: %s", name, rows, error)
            break
    return seconds


def _timed(run: _Run, inputs: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started
