"""Loads a model: session, batching proof, warm-up, batcher."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from tensorferry.batcher import Batcher, Padding
from tensorferry.server.classification import read_labels
from tensorferry.server.config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.models import Model
from tensorferry.server.padding import padding_of, prove_padding
from tensorferry.server.proof import prove, sample, varies, working_size
from tensorferry.server.session import Session
from tensorferry.server.signature import Signature
from tensorferry.server.steady import is_steady

_log = logging.getLogger("tensorferry.server")


def load_model(source: ModelSource, config: ServerConfig, device: str) -> Model:
    """The model, proved, warm and ready to take requests. StartError names file and reason."""
    started = time.monotonic()
    session = Session(source.path, device)
    declared = _declared_padding(session, config)
    max_batch_size, batching, size = _decide_batching(source.name, session, config)
    padding = _decide_padding(source.name, session, config, declared, max_batch_size, size)
    ladder: list[Mapping[str, int]] = [{}]
    if padding is not None and config.pad_lengths is not None:
        axis, lengths = config.pad_lengths
        ladder = [{axis: length} for length in lengths]
        batching += f", padded along {axis!r} to {', '.join(map(str, lengths))}"
    runs = [_warm_up(session, max_batch_size, size, sizes) for sizes in ladder]
    warmed = runs[-1]
    _log.info(
        "model %s loaded from %s on %s in %.2f s, warmed at batches of %s",
        source.name,
        source.path,
        device,
        time.monotonic() - started,
        ", ".join(map(str, warmed)) or "no size: it does not run on random input",
    )
    batcher = Batcher(
        session.run,
        max_batch_size,
        config.max_queue_delay,
        preferred_batch_sizes=config.preferred_batch_sizes if max_batch_size else (),
        priority_weights=config.priority_weights,
        default_priority=config.default_priority,
        max_queue_size=config.max_queue_size,
        max_queue_bytes=config.max_queue_bytes,
        # The host has hands free while a GPU computes; on the CPU both would share the cores.
        pipelined=device != "cpu",
        steady=device == "cpu" and is_steady(source.path),
        name=source.name,
    )
    if padding is not None and size is not None:
        for sizes, run in zip(ladder, runs, strict=True):
            inputs = sample(session.signature, 1, size, sizes=sizes)
            key = tuple(inputs[spec.name].shape[1:] for spec in session.signature.inputs)
            for rows, seconds in run.items():
                batcher.anchor(rows, seconds, key)
    elif not varies(session.signature):
        for rows, seconds in warmed.items():
            batcher.anchor(rows, seconds)
    slo = config.slo or math.inf
    _warn_of_unreachable_batches(source.name, session.signature, max_batch_size, warmed, slo, config)
    return Model(
        source.name,
        source.version,
        session.signature,
        max_batch_size,
        batching,
        batcher,
        slo,
        padding,
        labels=read_labels(source.config, source.directory),
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


def _decide_batching(name: str, session: Session, config: ServerConfig) -> tuple[int, str, int | None]:
    """The batch size that is safe, in words how the model is batched, and a size that warms it up."""
    signature = session.signature
    if config.max_batch_size == 0:
        return 0, "unbatched (--max-batch-size 0)", working_size(signature, session.run)[0]
    lacking = signature.lacks_batch_axis()
    if lacking is not None:
        _log.warning("model %s is served unbatched: %s", name, lacking)
        return 0, f"unbatched ({lacking})", working_size(signature, session.run)[0]
    if config.batching == "trust":
        _log.warning("model %s is batched without proof (--batching trust)", name)
        return config.max_batch_size, _words(config, "trusted"), working_size(signature, session.run)[0]
    verdict = prove(signature, session.run)
    if not verdict.batchable:
        _log.warning(
            "model %s is served unbatched: %s (--batching trust batches it all the same)",
            name,
            verdict.reason,
        )
        return 0, f"unbatched ({verdict.reason})", verdict.size
    return config.max_batch_size, _words(config, "proved"), verdict.size


def _declared_padding(session: Session, config: ServerConfig) -> Padding | None:
    if config.pad_lengths is None:
        return None
    try:
        return padding_of(session.signature, config.pad_lengths, dict(config.pad_values))
    except StartError as error:
        raise StartError(f"{session.path}: {error}") from None


def _decide_padding(
    name: str,
    session: Session,
    config: ServerConfig,
    declared: Padding | None,
    max_batch_size: int,
    size: int | None,
) -> Padding | None:
    """The padding, if it was asked for and is safe."""
    if declared is None or config.pad_lengths is None:
        return None
    if max_batch_size == 0:
        _log.warning("model %s is not padded: it is served unbatched, so nothing shares a batch", name)
        return None
    if config.batching == "trust":
        _log.warning("model %s is padded without proof (--batching trust)", name)
        return declared
    reason = prove_padding(session.signature, session.run, declared, config.pad_lengths.axis, size or 1)
    if reason:
        _log.warning(
            "model %s is not padded, each length has batches of its own: %s (--batching trust pads it all the same)",
            name,
            reason,
        )
        return None
    return declared


def _words(config: ServerConfig, how: str) -> str:
    window = f" after at most {config.max_queue_delay * 1e3:g} ms" if config.max_queue_delay else ""
    return f"batches of up to {config.max_batch_size} rows{window} ({how})"


def _warm_up(
    session: Session, max_batch_size: int, size: int | None, sizes: Mapping[str, int]
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
        inputs: Mapping[str, Any] = sample(session.signature, rows, size, sizes=sizes)
        try:
            session.run(inputs)
            seconds[rows] = min(_timed(session, inputs) for _ in range(2))
        except ModelFailedError as error:
            _log.warning("%s: warm-up ended at a batch of %d rows: %s", session.path, rows, error)
            break
    return seconds


def _timed(session: Session, inputs: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    session.run(inputs)
    return time.perf_counter() - started
