"""ModelStatistics, status and metrics page of a server of several processes: each is asked for its own, and they are merged.

Each process is a whole server with its own models and counts, so counts are summed. On the metrics page, each series has
the number of its process as a label instead. A sum would fall when a process is replaced, and Prometheus takes a counter
that falls for one that began at zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.observability.monitoring.http_server import PageRenderer
from tensorferry.server.observability.monitoring.metrics.metric_names import ProcessMetric
from tensorferry.server.observability.monitoring.metrics.metrics import encoder_of
from tensorferry.server.observability.monitoring.status_report import MAX_BATCHES
from tensorferry.server.processes.peers import Peers

# Fields of a model's or stage's status that have only counts.
_COUNTS = ("requests", "refusals", "times", "answer_seconds", "predictions", "padding", "queue", "sequences")

_END = "# EOF"
_NAME = re.compile(r"[a-zA-Z_:][\w:]*", re.ASCII)
# Metrics of the server as a whole: the pages of all processes have the same.
_COMMON = frozenset(metric.on_page for metric in ProcessMetric)

_T = TypeVar("_T")

# What a process asks of the others.
_STATISTICS, _METRICS, _STATUS = "statistics", "metrics", "status"

Statistics = Callable[[pb.ModelStatisticsRequest], pb.ModelStatisticsResponse]


def statistics_of_all(peers: Peers, own: Statistics) -> Statistics:
    """Return ModelStatistics of all processes. `own` returns that of this one, for the others too."""

    def answer(content: bytes) -> bytes:
        return own(pb.ModelStatisticsRequest.FromString(content)).SerializeToString()

    def statistics(request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        answers = peers.ask(_STATISTICS, request.SerializeToString())
        return merged_statistics([pb.ModelStatisticsResponse.FromString(each) for each in answers])

    peers.on(_STATISTICS, answer)
    return statistics


def page_of_all(peers: Peers, own: PageRenderer) -> PageRenderer:
    """Return the metrics page of all processes. `own` returns that of this one, for the others too."""

    def page(accept: str) -> tuple[bytes, str]:
        return joined_page(peers.ask(_METRICS, accept.encode())), encoder_of(accept)[1]

    peers.on(_METRICS, lambda content: labelled_page(own(content.decode())[0], peers.index))
    return page


def status_of_all(peers: Peers, own: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return the status of all processes. `own` returns that of this one, for the others too."""
    peers.on(_STATUS, lambda content: json.dumps(own()).encode())
    return lambda: merged_status([json.loads(each) for each in peers.ask(_STATUS)])


def merged_statistics(responses: Sequence[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """Return the statistics of all processes by model and version, in the order of their first occurrence."""
    models = _groups((response.model_stats for response in responses), attrgetter("name", "version"))
    return pb.ModelStatisticsResponse(model_stats=[_merged_model_statistics(of) for of in models])


def _merged_model_statistics(of: Sequence[pb.ModelStatistics]) -> pb.ModelStatistics:
    merged = pb.ModelStatistics(
        name=of[0].name,
        version=of[0].version,
        last_inference=max(one.last_inference for one in of),
        inference_count=sum(one.inference_count for one in of),
        execution_count=sum(one.execution_count for one in of),
    )
    for one in of:
        _add_durations(merged.inference_stats, one.inference_stats)
        for place, response in one.response_stats.items():
            _add_durations(merged.response_stats[place], response)
    for batches in _groups((one.batch_stats for one in of), attrgetter("batch_size")):
        size = merged.batch_stats.add(batch_size=batches[0].batch_size)
        for batch in batches:
            _add_durations(size, batch)
    merged.batch_stats.sort(key=attrgetter("batch_size"))
    for usages in _groups((one.memory_usage for one in of), attrgetter("type", "id")):
        size_in_bytes = sum(usage.byte_size for usage in usages)
        merged.memory_usage.add(type=usages[0].type, id=usages[0].id, byte_size=size_in_bytes)
    return merged


def _add_durations(total: Any, one: Any) -> None:
    """Add the durations among the fields of a message to those of another of the same type."""
    for described, value in one.ListFields():
        if isinstance(value, pb.StatisticDuration):
            duration = getattr(total, described.name)
            duration.count += value.count
            duration.ns += value.ns


def merged_status(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the status of all processes from at least one report of `StatusReport.report`.

    Fields that are not merged are those of the first report. A model is READY if it is in all reports that have it.
    Its `devices` are those of all processes in turn, and `instance` of a batch is the index of one of them.
    """
    first = reports[0]
    uptime = max(report["server"]["uptime_seconds"] for report in reports)
    models = _groups((report["models"] for report in reports), itemgetter("name", "version"))
    return {
        **first,
        "server": {**first["server"], "uptime_seconds": uptime},
        "ready": all(report["ready"] for report in reports),
        "draining": any(report["draining"] for report in reports),
        "problems": _united(report["problems"] for report in reports),
        "now_seconds": max(report["now_seconds"] for report in reports),
        "models": [_merged_model(of) for of in models],
    }


def _merged_model(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shown = next((one for one in models if one["state"] != ModelState.READY.value), models[0])
    loaded = [one for one in models if "requests" in one]
    if not loaded:
        return dict(shown)
    settings = [one["settings"] for one in loaded]
    # Several steps may have the same name.
    steps = _groups(
        (enumerate(one["steps"]) for one in loaded), lambda step: (step[0], step[1]["stage"], step[1]["name"])
    )
    stages = _groups((one["stages"] for one in loaded), itemgetter("name"))
    return {
        **loaded[0],
        "state": shown["state"],
        "reason": shown["reason"],
        "settings": {**settings[0], "devices": _joined(one["devices"] for one in settings)},
        **_merged_counts(loaded, [len(one["devices"]) for one in settings]),
        "cache": _sum([one["cache"] for one in loaded]),
        "steps": [_merged_step([step for _, step in of]) for of in steps],
        "stages": [_merged_stage(of) for of in stages],
    }


def _merged_step(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: _sum([one[name] for one in of]) for name in ("ran", "compute_seconds")}
    return {**of[0], "processes": _joined(one["processes"] for one in of), **counts}


def _merged_stage(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [one for one in of if one["model"] is None]
    if not own:
        return dict(of[0])
    devices = [one["devices"] for one in own]
    return {**own[0], "devices": _joined(devices), **_merged_counts(own, [len(each) for each in devices])}


def _merged_counts(of: Sequence[Mapping[str, Any]], instances: Sequence[int]) -> dict[str, Any]:
    """Return the fields from `requests` to `last_batches`. `instances` has the number of instances of each process."""
    batches = [one["batches"] for one in of]
    fullest = max(batches, key=lambda one: one["full_rows"] or 0)
    last_batches = [
        {**batch, "instance": batch["instance"] + sum(instances[:at])}
        for at, one in enumerate(of)
        for batch in one["last_batches"]
    ]
    return {
        **{name: _sum([one[name] for one in of]) for name in _COUNTS},
        "batches": {
            **_sum(batches),
            # Learned by each process for itself, and one chose the other.
            "full_rows": fullest["full_rows"],
            "row_seconds": fullest["row_seconds"],
        },
        "warnings": _united(one["warnings"] for one in of),
        # The clock is the same in all processes.
        "last_batches": sorted(last_batches, key=itemgetter("answered"))[-MAX_BATCHES:],
    }


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of numbers, or the sums by key or place of mappings or sequences; None if all are None."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        return {name: _sum(one.get(name) for one in known) for name in dict.fromkeys(chain(*known))}
    if isinstance(known[0], Sequence):
        return [_sum(each) for each in zip_longest(*known)]
    return sum(known)


def _joined(lists: Iterable[Iterable[_T]]) -> list[_T]:
    return list(chain.from_iterable(lists))


def _united(lists: Iterable[Iterable[_T]]) -> list[_T]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def _groups(lists: Iterable[Iterable[_T]], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Return the items of all lists in groups of one key, in the order of its first occurrence."""
    groups: dict[Hashable, list[_T]] = {}
    for each in chain.from_iterable(lists):
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def labelled_page(page: bytes, process: int) -> bytes:
    """Return the page of `Metrics.page` with the label of this process in each of its own series."""
    # Not splitlines, because labels may contain other line separators.
    return "\n".join([_labelled(line, process) for line in page.decode().split("\n")]).encode()


def _labelled(line: str, process: int) -> str:
    name = _NAME.match(line)
    if name is None or name[0] in _COMMON:
        return line
    rest = line[name.end() :]
    inner = f",{rest[1:]}" if rest.startswith("{") else f"}}{rest}"
    return f'{name[0]}{{process="{process}"{inner}'


def joined_page(pages: Sequence[bytes]) -> bytes:
    """Return one page of labelled ones: each metric once, with the series of all pages."""
    metrics: dict[str, list[str]] = {}
    end: list[str] = []
    for number, page in enumerate(pages):
        lines: list[str] = []
        for line in page.decode().split("\n"):
            if line in (_END, ""):
                end.append(line)
            elif line.startswith("# "):
                lines = metrics.setdefault(line.split(" ", 3)[2], [])
                if line not in lines:
                    lines.append(line)
            elif not number or line.partition("{")[0].partition(" ")[0] not in _COMMON:
                lines.append(line)
    last = [_END, ""] if _END in end else [""]
    return "\n".join([*(line for lines in metrics.values() for line in lines), *last]).encode()
