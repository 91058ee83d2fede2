"""Names in PromQL expressions (metrics, labels, values), and their presence on a page of metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from support.server.pipelines import PROCESS, BranchedModel

from tensorferry.server.observability.monitoring.metrics.metric_names import GPU_LABELS, GpuMetric
from tensorferry.server.observability.monitoring.metrics.metrics import process_families, step_families
from tensorferry.server.observability.monitoring.processes import ProcessStatus
from tensorferry.server.observability.monitoring.step_statistics import counts_of

# Labels that Prometheus adds to every series, and its own series about each scrape.
TARGET = ("job", "instance")
# The label that a server of several processes adds to the series of each process.
OF_SEVERAL = "process"
OF_PROMETHEUS = {"up"}
# Labels whose values an operator, a client or the hardware chooses.
OPEN = {*TARGET, "model", "version", "release", "gpu_uuid", "device", "priority"}

_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WORDS = {"and", "or", "unless", "bool", "by", "on", "without", "ignoring", "group_left", "group_right"}
_IDENTIFIER = re.compile(r"(?<![\w.$])([a-zA-Z_:][\w:]*)(\s*\()?")
_DURATION = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Named:
    """Names in an expression: metrics, the matchers of their labels, and the labels of its groups."""

    metrics: frozenset[str]
    matchers: frozenset[tuple[str, str, str]]
    grouping: frozenset[str]


@dataclass(slots=True)
class Page:
    """Series of a page by name: the labels of each, and the values of each label."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    values: dict[str, dict[str, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    series: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def add(self, name: str, labels: Mapping[str, str]) -> None:
        """Add a series."""
        self.labels[name] |= labels.keys() | {*TARGET, OF_SEVERAL}
        for label, value in labels.items():
            self.values[name][label].add(value)
        self.series.append((name, labels))


def page_of(text: str) -> Page:
    """Return the series of a page in the text format, with those of a pipeline, a GPU and a server of several processes."""
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser would append a suffix to Triton's counters.
            triton = sample.name.startswith("nv_") and family.type == "counter"
            page.add(sample.name.removesuffix("_total") if triton else sample.name, sample.labels)
    branched = BranchedModel(processes=(PROCESS,))
    steps = step_families([counts_of(branched.model)])
    branched.close()
    for family in (*process_families([ProcessStatus("server 0", 1, 1, "serving", 0)]), *steps):
        for sample in family.samples:
            page.add(sample.name, sample.labels)
    for metric in GpuMetric:
        page.add(metric.on_page, dict(zip(GPU_LABELS, ("cuda:0", "GPU-a"), strict=True)))
    return page


def named(expr: str) -> Named:
    """Return the names in an expression."""
    matchers = {
        (metric, label, value)
        for metric, inside in _SELECTOR.findall(expr)
        for label, _, value in _MATCHER.findall(inside)
    }
    grouping = {
        label.strip() for inside in _GROUPING.findall(expr) for label in inside.split(",") if label.strip()
    }
    bare = _STRING.sub('""', expr)
    bare = _GROUPING.sub(" ", re.sub(r"\{[^}]*\}", " ", _DURATION.sub(" ", bare)))
    metrics = {name for name, called in _IDENTIFIER.findall(bare) if not called and name not in _WORDS}
    return Named(frozenset(metrics), frozenset(matchers), frozenset(grouping))


def mistakes(expr: str, page: Page) -> Iterable[str]:
    """Return the names, labels and values in an expression that the page lacks."""
    found = named(expr)
    for metric in found.metrics - OF_PROMETHEUS:
        if metric not in page.labels:
            yield f"there is no metric {metric}"
    for metric, label, value in found.matchers:
        if metric in OF_PROMETHEUS:
            continue
        if label not in page.labels.get(metric, ()):
            yield f"{metric} has no label {label}"
        elif label not in OPEN:
            for one in value.split("|"):
                if one not in page.values[metric][label]:
                    yield f"{label} of {metric} is never {one}"
    there = {label for metric in found.metrics for label in page.labels.get(metric, TARGET)}
    for label in found.grouping - there:
        yield f"none of {', '.join(sorted(found.metrics))} has a label {label}"
