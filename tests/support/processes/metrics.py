"""The metrics of a server, read from its page."""

from __future__ import annotations

from collections.abc import Callable

from polling import until
from prometheus_client.parser import text_string_to_metric_families
from support.processes.probe import WAIT_SECONDS
from support.processes.server import ServerProcess


def scrape(server: ServerProcess) -> dict[str, float]:
    """Return the values of one model by name and further labels, `name{label=value}`; and by name,
    their sum.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.page()):
        for sample in family.samples:
            if sample.labels.pop("model", "probe") != "probe":
                continue
            sample.labels.pop("version", None)
            # Of several processes, the sum.
            sample.labels.pop("process", None)
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            found[key] = found.get(key, 0) + sample.value
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def scrape_until(server: ServerProcess, reached: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Return the value once it is as expected."""
    return until(lambda: scrape(server), reached, seconds=WAIT_SECONDS)
