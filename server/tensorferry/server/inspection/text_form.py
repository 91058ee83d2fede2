"""Inspections as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tensorferry.server.inspection.batch_sizes import BEST_RULE, WithinBound, best_size, full_batch, within
from tensorferry.server.inspection.batch_times import BatchTime
from tensorferry.server.inspection.core_layouts import LAYOUT_RULE, LayoutTime, better_layout
from tensorferry.server.inspection.inspection import Inspection
from tensorferry.server.inspection.measuring import Measurements
from tensorferry.server.names import printable
from tensorferry.server.signature import TensorSpec

_WIDTH = 100
# Left of the texts.
_INDENT = 10
_MIB = 1 << 20

_EFFECTS = {
    "proved": "the graph keeps rows apart",
    "tested": "running shows no mixing; the graph could not be analysed fully, or there is none",
    "trusted": "batched without a check",
    "refused": "each request runs alone",
    "off": "each request runs alone",
}


def text_of(found: Inspection, bounds: Sequence[float]) -> str:
    """Return what is known of a model. `bounds` are bounds of latency in seconds."""
    lines = [printable(f"{found.name}  ({found.kind}, {found.path})"), ""]
    lines += _tensors(found)
    lines += ["", *_verdict(found), ""]
    if found.measured is None or not found.measured.batches:
        why = found.not_measured or (found.measured.stopped if found.measured is not None else "")
        return "\n".join([*lines, *_labelled("measured", f"nothing: {why}")])
    lines += [*_measured(found, found.measured), ""]
    lines += _advice(found, found.measured.batches, bounds)
    if found.measured.layouts:
        lines += ["", *_layouts(found.measured.layouts)]
    return "\n".join(lines).rstrip()


def _tensors(found: Inspection) -> Iterator[str]:
    batched = found.decision.max_batch_size > 0
    rows = []
    for kind, specs in (
        ("input", found.signature.inputs),
        ("optional", found.signature.optional),
        ("output", found.signature.outputs),
    ):
        rows += [
            (kind, printable(spec.name), spec.datatype.name, _shape(spec), _axis(spec, batched))
            for spec in specs
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    widths[0] = _INDENT - 2
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True))
        yield f"{cells}  {row[4]}".rstrip()


def _shape(spec: TensorSpec) -> str:
    return "[...]" if spec.any_rank else str(list(spec.shape))


def _axis(spec: TensorSpec, batched: bool) -> str:
    if spec.has_row_axis:
        return f"axis {spec.batch_axis} counts rows"
    if batched:
        return "requests with equal values share a batch"
    return "the first axis is fixed" if spec.dims else "a scalar"


def _verdict(found: Inspection) -> Iterator[str]:
    decision = found.decision
    # The description has the reason, too, which is shown below.
    described = (
        decision.description.replace(f" ({decision.reason})", "") if decision.reason else decision.description
    )
    described = described.removesuffix(f" ({decision.verdict})").replace(f" ({decision.verdict}, ", " (")
    effect = _EFFECTS[decision.verdict]
    yield from _labelled("verdict", f"{decision.verdict.upper()}: {effect}; {described}")
    if decision.reason:
        yield from _labelled("because", decision.reason)
    if decision.evidence:
        yield from _labelled("ran", decision.evidence)
    if decision.rewritten:
        yield from _labelled(
            "copy",
            "a copy is served whose tensors begin with a variable batch axis; --write-batched OUT.onnx writes it",
        )
    for cure in decision.cures:
        yield from _labelled("change", cure)


def _measured(found: Inspection, measured: Measurements) -> Iterator[str]:
    what = f"on {', '.join(measured.devices)}" if measured.devices else "through the models that it uses"
    if found.kind != "onnx":
        what += ", through the batcher"
    elif not found.decision.merges and measured.batches[-1].rows > 1:
        what += ", as batches would be; requests run alone"
    if measured.loaded_bytes is not None:
        what += f"; loading took {measured.loaded_bytes / _MIB:.1f} MiB of resident memory"
    yield from _labelled("measured", what)
    if measured.memory:
        yield from _labelled("memory", measured.memory)
    if measured.lengths:
        lengths = ", ".join(f"{axis} {length}" for axis, length in measured.lengths.items())
        yield from _labelled("lengths", f"{lengths} (--length gives others)")
    if measured.padding_waste is not None:
        yield from _labelled(
            "padding", f"{100 * measured.padding_waste:.0f} % of the padded inputs is padding"
        )
    yield ""
    yield f"{'rows':>{_INDENT}}{'ms':>12}{'µs/row':>12}{'rows/s':>12}{'runs':>8}{'memory MiB':>14}"
    for batch in measured.batches:
        memory = "" if batch.memory_bytes is None else f"{batch.memory_bytes / _MIB:.1f}"
        milliseconds = batch.seconds * 1e3
        yield (
            f"{batch.rows:>{_INDENT}}{_number(milliseconds):>12}{_number(milliseconds * 1e3 / batch.rows):>12}"
            f"{_rate(batch.rows_per_second):>12}{batch.runs:>8}{memory:>14}"
        ).rstrip()
    if measured.stopped:
        yield from _labelled("stopped", measured.stopped)


def _advice(found: Inspection, batches: Sequence[BatchTime], bounds: Sequence[float]) -> Iterator[str]:
    best = best_size(batches)
    if best is not None and len(batches) > 1:
        text = f"{_rows(best.rows)}, {BEST_RULE}"
        if batches[0].rows == 1:
            text += f"; {best.rows_per_second / batches[0].rows_per_second:.1f} times as many as one by one"
        if found.decision.merges and best.rows > found.decision.max_batch_size:
            text += f"; serve it with --max-batch-size {best.rows}"
        yield from _labelled("best", text)
    if found.decision.merges and (full := full_batch(batches, most := found.decision.max_batch_size)):
        why = f"larger ones up to {most} take more time for each row" if full < most else "--max-batch-size"
        yield from _labelled("full", f"a full batch has {_rows(full)}: {why}")
    for seconds in bounds:
        yield from _labelled(f"{seconds * 1e3:g} ms", _bound(within(batches, seconds), batches))


def _layouts(layouts: Sequence[LayoutTime]) -> Iterator[str]:
    one, better = layouts[0], better_layout(layouts)
    if better is None:
        text = (
            f"one session of {one.threads} threads, the default; no other layout carries {LAYOUT_RULE} more"
        )
    else:
        text = (
            f"--instances {better.sessions} --threads {better.threads} carries "
            f"{better.rows_per_second / one.rows_per_second:.2f} times the rows/s of one session, the default; a row alone "
            f"takes {better.alone_seconds / one.alone_seconds:.2f} times as long, and each session has a copy of the weights"
        )
    yield from _labelled("cores", text)
    yield ""
    yield f"{'sessions':>{_INDENT}}{'threads':>12}{'rows/s':>12}{'ms alone':>12}   in batches of {_rows(one.rows)}"
    for layout in layouts:
        yield (
            f"{layout.sessions:>{_INDENT}}{layout.threads:>12}{_rate(layout.rows_per_second):>12}"
            f"{_number(layout.alone_seconds * 1e3):>12}"
        )


def _bound(found: WithinBound, batches: Sequence[BatchTime]) -> str:
    if found.alone is None:
        fastest = batches[0]
        return f"no batch: one of {_rows(fastest.rows)} takes {_number(fastest.seconds * 1e3)} ms"
    text = f"a batch of up to {_admitted(found.alone)}"
    if found.after_another is None:
        return f"{text}; none if a request has to wait for the batch before it"
    if found.after_another == found.alone:
        return f"{text}, also after the batch before it"
    return f"{text}; up to {_admitted(found.after_another)} if a request has to wait for the batch before it"


def _admitted(batch: BatchTime) -> str:
    return f"{_rows(batch.rows)} ({_number(batch.seconds * 1e3)} ms): {_rate(batch.rows_per_second)} rows/s"


def _rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def _rate(rate: float) -> str:
    """Return rows per second with three digits that count."""
    return f"{rate:,.3g}" if rate < 100 else f"{round(rate, 3 - len(str(int(rate)))):,.0f}"


def _number(value: float) -> str:
    """Return a number with about three digits that count."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=label.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
