"""Text of `tensorferry top`, from the last samples of a server's status."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.client.messages.printable import printable

Status = dict[str, Any]

# Period of rates and percentiles, in seconds.
SPAN_SECONDS = 5.0

_LOST = ("refused", "shed", "expired", "failed", "cancelled", "abandoned")
_BAR_WIDTH = 24
_SHOWN_BATCHES = 8


class StatusSamples:
    """Samples of the last seconds, the newest last."""

    def __init__(self) -> None:
        self._kept: deque[Status] = deque()

    def add(self, status: Status) -> None:
        """Add a sample. A restart of the server discards the earlier samples."""
        kept = self._kept
        if kept and status["server"]["uptime_seconds"] < self.newest["server"]["uptime_seconds"]:
            kept.clear()
        kept.append(status)
        while len(kept) > 2 and status["now_seconds"] - kept[1]["now_seconds"] >= SPAN_SECONDS:
            kept.popleft()

    @property
    def newest(self) -> Status:
        """The newest sample."""
        return self._kept[-1]

    @property
    def models(self) -> Sequence[str]:
        """The names of the models."""
        return list(dict.fromkeys(model["name"] for model in self.newest["models"]))

    def before(self, model: Status) -> Status:
        """Return the model in the first sample; the model itself if its counters were reset since."""
        for one in self._kept[0]["models"]:
            if (one["name"], one["version"]) == (model["name"], model["version"]) and "requests" in one:
                return one if one["requests"]["accepted"] <= model["requests"]["accepted"] else model
        return model

    @property
    def seconds(self) -> float:
        """Seconds from the first sample to the last."""
        return float(self.newest["now_seconds"] - self._kept[0]["now_seconds"])


def lines_of(samples: StatusSamples, width: int, only: str | None = None, *, blocks: str = "█") -> list[str]:
    """Return the lines to show, each at most `width` wide; `only` restricts them to one model."""
    status = samples.newest
    server = status["server"]
    state = "draining" if status["draining"] else "ready" if status["ready"] else "NOT READY"
    lines = [
        f"tensorferry {server['version']} on {server['address']}: {state}, {server['transport']} transport, "
        f"up {_duration(server['uptime_seconds'])}"
    ]
    lines += [f"! {problem}" for problem in status["problems"]]
    models = [model for model in status["models"] if only in (None, model["name"])]
    lines += ["", *_table(samples, models)]
    for model in models:
        if "requests" in model:
            lines += ["", *_detail(samples, model, blocks)]
    return [printable(line)[:width] for line in lines]


def _table(samples: StatusSamples, models: Sequence[Status]) -> list[str]:
    names = [f"{model['name']} v{model['version']}" for model in models]
    wide = max([5, *map(len, names)])
    lines = [
        f"{'MODEL':{wide}} {'STATE':11} {'ANSWERED/s':>10} {'LOST/s':>7} {'P50':>8} {'P95':>8} {'P99':>8} "
        f"{'QUEUE P50':>9} {'ROWS/BATCH':>10} {'PADDING':>7} {'QUEUED':>7} {'RUNNING':>7} {'BUSY':>5}"
    ]
    for name, model in zip(names, models, strict=True):
        line = f"{name:{wide}} {model['state'].lower():11}"
        if "requests" in model:
            line += _figures(samples, model)
        lines.append(line)
    return lines


def _figures(samples: StatusSamples, model: Status) -> str:
    then, seconds = samples.before(model), max(samples.seconds, 1e-9)
    bounds = samples.newest["bounds_seconds"]

    def rate(names: Sequence[str]) -> float:
        return float(sum(model["requests"][name] - then["requests"][name] for name in names)) / seconds

    total, queue = (_less(model["times"][which], then["times"][which]) for which in ("total", "queue"))
    p50, p95, p99 = (_time(percentile(total, bounds, share)) for share in (0.5, 0.95, 0.99))
    now, before = model["batches"], then["batches"]
    ran = now["ran"] - before["ran"]
    rows = f"{(now['rows'] - before['rows']) / ran:.1f}" if ran else "-"
    devices = len(model["settings"]["devices"])
    ran_seconds = now["compute_seconds"] - before["compute_seconds"]
    # All steps of a pipeline may be other models, which have the devices.
    busy = f"{ran_seconds / seconds / devices:.0%}" if devices else "-"
    sizes = model["queue"]
    return (
        f" {rate(['answered']):>10,.0f} {rate(_LOST):>7,.1f} {p50:>8} {p95:>8} {p99:>8} "
        f"{_time(percentile(queue, bounds, 0.5)):>9} {rows:>10} {_padding(model, then):>7} {sizes['rows']:>7} {sizes['running']:>7} {busy:>5}"
    )


def _padding(now: Status, then: Status) -> str:
    """Return the share of padding in the inputs that were padded since `then`; "-" if none were."""
    added, data = (now["padding"][which] - then["padding"][which] for which in ("added", "positions"))
    return f"{added / (added + data):.0%}" if added + data else "-"


def percentile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the percentile in seconds, interpolated within its interval; None without data."""
    rest = share * sum(counts)
    low = 0.0
    for count, high in zip(counts, [*bounds, bounds[-1]], strict=True):
        if count and count >= rest:
            return low + (high - low) * rest / count
        rest -= count
        low = high
    return None


def _less(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(now, then, strict=True)]


def _detail(samples: StatusSamples, model: Status, blocks: str) -> list[str]:
    settings, now, earlier = model["settings"], model["batches"], samples.before(model)
    then = earlier["batches"]
    sizes = _grown(now["by_rows"], then["by_rows"]) or now["by_rows"]
    reasons = _grown(now["by_reason"], then["by_reason"]) or now["by_reason"]
    left = ["batch sizes", *_bars(_grouped(sizes), blocks)]
    right = ["why batches closed", *_bars(reasons, blocks)]
    most = max(len(left), len(right))
    left += [""] * (most - len(left))
    right += [""] * (most - len(right))
    between = max(map(len, left)) + 4
    lines = [
        f"{model['name']} v{model['version']}: {model['batching']}, on {', '.join(settings['devices']) or 'its models'}"
    ]
    lines += [f"! {warning}" for warning in model["warnings"]]
    if not model.get("stages"):
        lines += _full_batch(now)
    lines += _steps(model, earlier)
    lines += [f"  {one:{between}}{other}" for one, other in zip(left, right, strict=True)]
    return lines + _batches(model["last_batches"])


def _steps(model: Status, earlier: Status) -> list[str]:
    """Return a line for each stage of a model that is made of steps. Servers of older releases have none."""
    steps = model.get("steps", ())
    names = list(dict.fromkeys(step["stage"] for step in steps))
    if not steps:
        return []
    now, then = _by_stage(model), _by_stage(earlier)
    whole = sum(_mean_times(model, earlier) or ())
    wide = max([5, *map(len, names)])
    lines = [
        f"  {'STAGE':{wide}} {'QUEUE':>8} {'BATCH':>8} {'SHARE':>5} {'ROWS/BATCH':>10} {'QUEUED':>7}  STEPS"
    ]
    for name in names:
        of_steps = ", ".join(
            f"{step['name']} {_time(_step_mean(step, before))}"
            for step, before in zip(steps, earlier["steps"], strict=False)
            if step["stage"] == name
        )
        stage = now.get(name)
        if stage is None:
            lines.append(f"  {name:{wide}} {'(a model of its own)':42}  {of_steps}")
            continue
        before = then.get(name, stage)
        means = _mean_times(stage, before)
        queue, batch = means or (None, None)
        share = f"{sum(means) / whole:.0%}" if means and whole else "-"
        ran = stage["batches"]["ran"] - before["batches"]["ran"]
        rows = f"{(stage['batches']['rows'] - before['batches']['rows']) / ran:.1f}" if ran else "-"
        lines.append(
            f"  {name:{wide}} {_time(queue):>8} {_time(batch):>8} {share:>5} {rows:>10} "
            f"{stage['queue']['rows']:>7}  {of_steps}"
        )
    return lines


def _by_stage(model: Status) -> Mapping[str, Status]:
    """Return the counts of each stage; a model of one stage has its own."""
    stages = {stage["name"]: stage for stage in model["stages"] if stage["model"] is None}
    return stages if model["stages"] else {model["steps"][0]["stage"]: model}


def _mean_times(now: Status, then: Status) -> tuple[float, float] | None:
    """Return the mean seconds of the requests answered since `then` in the queue and in a batch; None without any."""
    answered = now["requests"]["answered"] - then["requests"]["answered"]
    if not answered:
        return None
    queue, *batch = [
        (now["answer_seconds"][part] - then["answer_seconds"][part]) / answered
        for part in ("queue", "input", "compute", "output")
    ]
    return queue, sum(batch)


def _step_mean(now: Status, then: Status) -> float | None:
    if now["ran"] is None or now["ran"] == then["ran"]:
        return None
    seconds: float = now["compute_seconds"] - then["compute_seconds"]
    ran: int = now["ran"] - then["ran"]
    return seconds / ran


def _full_batch(batches: Status) -> list[str]:
    """Return the rows of a full batch, with the times that chose them. Servers of older releases have none."""
    if not batches.get("row_seconds"):
        return []
    times = ", ".join(f"{rows}: {_time(seconds)}" for rows, seconds in batches["row_seconds"].items())
    return [f"  a full batch has {batches['full_rows']} rows; time per row by rows: {times}"]


def _grown(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
    grown = {name: count - then.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in grown.items() if count > 0}


def _grouped(by_rows: Mapping[str, int]) -> dict[str, int]:
    """Group batch sizes by powers of two."""
    grouped: dict[int, int] = {}
    for rows, count in by_rows.items():
        group = max(int(rows), 1).bit_length() - 1
        grouped[group] = grouped.get(group, 0) + count
    return {
        ("1 row" if group == 0 else f"{1 << group}-{(2 << group) - 1} rows"): grouped[group]
        for group in sorted(grouped)
    }


def _bars(counts: Mapping[str, int], blocks: str) -> list[str]:
    if not counts:
        return ["none yet"]
    most, total, wide = max(counts.values()), sum(counts.values()), max(map(len, counts))
    return [
        f"{name:>{wide}} {blocks * max(1, round(_BAR_WIDTH * count / most)):{_BAR_WIDTH}} {count / total:>4.0%}"
        for name, count in counts.items()
    ]


def _batches(batches: Sequence[Status]) -> list[str]:
    if not batches:
        return []
    lines = [
        f"  {'BATCH':>9} {'ROWS':>5} {'REQUESTS':>8} {'REASON':9} {'WAITED':>8} {'RAN':>8} {'TOOK':>8} "
        f"{'PREDICTED':>9}  REQUESTS"
    ]
    for batch in reversed(batches[-_SHOWN_BATCHES:]):
        members = batch["members"]
        waited = max((member["waited_seconds"] for member in members or ()), default=None)
        took = (batch["done"] or batch["answered"]) - batch["closed"]
        number = "failed" if batch["error"] else f"#{batch['number']}"
        lines.append(
            f"  {number:>9} {batch['rows']:>5} {batch['requests']:>8} {batch['reason'] or '':9} {_time(waited):>8} "
            f"{_time(batch['ended'] - batch['started']):>8} {_time(took):>8} {_time(batch['predicted_seconds']):>9}  "
            f"{batch['error'] + ' ' if batch['error'] else ''}{_members(members)}"
        )
    return lines


def _members(members: Sequence[Status] | None) -> str:
    if members is None:
        return "(not recorded: no viewer was active)"
    return ", ".join(
        (member["id"] or "-") + (f" x{member['rows']}" if member["rows"] != 1 else "") for member in members
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds * 1e6:.3g}us"


def _duration(seconds: float) -> str:
    whole, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if whole >= size or (unit == "s" and not parts):
            parts.append(f"{whole // size} {unit}")
            whole %= size
    return " ".join(parts[:2])
