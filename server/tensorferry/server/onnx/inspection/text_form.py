"""Inspections as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tensorferry.server.names import printable
from tensorferry.server.onnx.inspection.inspection import Inspection
from tensorferry.server.onnx.measuring.batch_sizes import BEST_RULE, within
from tensorferry.server.onnx.measuring.batch_times import BatchTime
from tensorferry.server.onnx.measuring.core_layouts import LAYOUT_RULE, LayoutTime, better_layout
from tensorferry.server.onnx.measuring.measurements import Measurements
from tensorferry.server.signature import TensorSpec

_WIDTH = 100
# Left of the texts.
_INDENT = 10
_MIB = 1 << 20

_ALONE = "each request runs alone"
_EFFECTS = {
    "proved": "the graph keeps rows apart",
    "tested": "running shows no mixing; the graph could not be analysed fully, or there is none",
    "trusted": "batched without a check",
    "refused": _ALONE,
    "off": _ALONE,
}
_COPY = "a copy is served whose tensors begin with a variable batch axis; --write-batched OUT.onnx writes it"


def text_of(found: Inspection, bounds: Sequence[float]) -> str:
    """Return what is known of a model. `bounds` are bounds of latency in seconds."""
    measured = found.measured
    lines = [printable(f"{found.name}  ({found.kind}, {found.path})"), ""]
    lines += [*_tensors(found), "", *_verdict(found), ""]
    if measured is None or not measured.batches:
        why = found.not_measured if measured is None else measured.stopped
        lines += _labelled("measured", f"nothing: {why}")
    else:
        lines += [*_measured(found, measured), "", *_advice(found, bounds), "", *_layouts(measured)]
    return "\n".join(lines).rstrip()


def _tensors(found: Inspection) -> Iterator[str]:
    signature = found.signature
    kinds = {"input": signature.inputs, "optional": signature.optional, "output": signature.outputs}
    batched = found.decision.max_batch_size > 0
    rows = [
        (kind, printable(spec.name), spec.datatype.name, _shape(spec), _axis(spec, batched))
        for kind, specs in kinds.items()
        for spec in specs
    ]
    names, datatypes, shapes = (max(map(len, column)) for column in list(zip(*rows, strict=True))[1:4])
    for kind, name, datatype, shape, axis in rows:
        yield f"{kind:<{_INDENT}}{name:<{names}}  {datatype:<{datatypes}}  {shape:<{shapes}}  {axis}"


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
    # The description has the reason and the verdict, too, which are shown beside it.
    described = decision.description.replace(f" ({decision.reason})", "")
    described = described.removesuffix(f" ({decision.verdict})").replace(f" ({decision.verdict}, ", " (")
    effect = _EFFECTS[decision.verdict]
    yield from _labelled("verdict", f"{decision.verdict.upper()}: {effect}; {described}")
    yield from _labelled("because", decision.reason)
    yield from _labelled("ran", decision.evidence)
    yield from _labelled("copy", _COPY if decision.rewritten else "")
    for remedy in decision.remedies:
        yield from _labelled("change", remedy)
    for provider, operators in found.nodes.items():
        total = sum(operators.values())
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(operators.items()))
        yield from _labelled("nodes", f"{total} on {provider}: {listed}")
    if found.states:
        pairs = ",".join(f"{given}={taken}" for given, taken in found.states.items())
        yield from _labelled(
            "states",
            f"--state {pairs} would keep these tensors in the server, for clients that send sequences",
        )


def _measured(found: Inspection, measured: Measurements) -> Iterator[str]:
    what = f"on {', '.join(measured.devices)}" if measured.devices else "through the models that it uses"
    if found.kind != "onnx":
        what += ", through the batcher"
    elif not found.decision.merges and measured.batches[-1].rows > 1:
        what += ", as batches would be; requests run alone"
    if measured.loaded_bytes is not None:
        what += f"; loading took {measured.loaded_bytes / _MIB:.1f} MiB of resident memory"
    yield from _labelled("measured", what)
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
        times = f"{_number(batch.ms):>12}{_number(batch.ms_per_row * 1e3):>12}{_rate(batch):>12}"
        yield f"{batch.rows:>{_INDENT}}{times}{batch.runs:>8}{memory:>14}".rstrip()
    yield from _labelled("stopped", measured.stopped)


def _advice(found: Inspection, bounds: Sequence[float]) -> Iterator[str]:
    batches, best, most = found.batches, found.best, found.decision.max_batch_size
    if best is not None and len(batches) > 1:
        text = f"{_rows(best.rows)}, {BEST_RULE}"
        if batches[0].rows == 1:
            text += f"; {best.rows_per_second / batches[0].rows_per_second:.1f} times as many as one by one"
        if found.decision.merges and best.rows > most:
            text += f"; serve it with --max-batch-size {best.rows}"
        yield from _labelled("best", text)
    if full := found.full_rows:
        why = f"larger ones up to {most} take more time for each row" if full < most else "--max-batch-size"
        yield from _labelled("full", f"a full batch has {_rows(full)}: {why}")
    for seconds in bounds:
        yield from _labelled(f"{seconds * 1e3:g} ms", _bound(batches, seconds))


def _layouts(measured: Measurements) -> Iterator[str]:
    if not measured.layouts:
        return
    one, better = measured.layouts[0], better_layout(measured.layouts)
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
    for each in measured.layouts:
        yield f"{each.sessions:>{_INDENT}}{each.threads:>12}{_rate(each):>12}{_number(each.ms_alone):>12}"


def _bound(batches: Sequence[BatchTime], seconds: float) -> str:
    alone, after_another = within(batches, seconds)
    if alone is None:
        return f"no batch: one of {_rows(batches[0].rows)} takes {_number(batches[0].ms)} ms"
    text = f"a batch of up to {_admitted(alone)}"
    if after_another is None:
        return f"{text}; none if a request has to wait for the batch before it"
    if after_another == alone:
        return f"{text}, also after the batch before it"
    return f"{text}; up to {_admitted(after_another)} if a request has to wait for the batch before it"


def _admitted(batch: BatchTime) -> str:
    return f"{_rows(batch.rows)} ({_number(batch.ms)} ms): {_rate(batch)} rows/s"


def _rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def _rate(timed: BatchTime | LayoutTime) -> str:
    """Return rows per second with three digits that count."""
    rate = timed.rows_per_second
    return f"{rate:,.3g}" if rate < 100 else f"{round(rate, 3 - len(str(int(rate)))):,.0f}"


def _number(value: float) -> str:
    """Return a number with about three digits that count."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _labelled(label: str, text: str) -> list[str]:
    """Return the lines of a text beside its label; none if it is empty."""
    left, other = label.ljust(_INDENT), " " * _INDENT
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent=left, subsequent_indent=other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
