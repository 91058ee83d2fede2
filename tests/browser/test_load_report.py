"""The report of `tensorferry bench --html` in a real browser, without network."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import Chromium, needs_chromium

from tensorferry.client.load import result_file
from tensorferry.client.load.records import Tally
from tensorferry.client.load.result_file import write_report
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.server_statistics import ServerSide
from tensorferry.client.load.steps import Step

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=document.title='owned'></script><script>document.title='owned'</script>"


def measured(step: Step, rate: int, latency: float, failures: int = 0, *, server: bool = True) -> StepResult:
    """Return a made-up result, with 5 intervals."""
    sizes = {rows: 100 - rows for rows in range(1, 1 + (step.concurrency or 16))}
    side = ServerSide(rate * 5, failures, latency / 2, latency / 3, 4.5, sizes) if server else None
    chance, result = random.Random(rate), StepResult(step, server=side)
    for _ in range(5):
        number = round(rate * chance.uniform(0.9, 1.1))
        latencies = [latency * chance.lognormvariate(0, 0.4) for _ in range(number)]
        failed = {"RESOURCE_EXHAUSTED": (failures, HOSTILE), "INTERNAL": (1, "x")} if failures else {}
        lags, cpu = [2e-4] * bool(step.rate), 0.95 if failures else 0.3
        result.add([Tally(latencies, number, 2 * number, lags, failed, seconds=1.0, cpu=cpu)])
    return result


def document(steps: list[StepResult], mode: str = "closed") -> dict[str, Any]:
    about = {
        "tool": "tensorferry 0", "started": "2026-11-23T12:00:00+00:00",
        "command": "tensorferry bench " + "long-word-" * 30, "target": "127.0.0.1:8001", "server": HOSTILE,
        "model": HOSTILE, "model_version": "", "mode": mode, "arrivals": "poisson", "stream": False,
        "rows": 2, "processes": 1, "connections": None, "warmup_seconds": 1.0, "duration_seconds": 5.0,
        "timeout_seconds": 10.0, "client_cores": 2, "client_python": "3", "client_grpcio": "1",
    }  # fmt: skip
    return result_file.document(about, steps)


def closed(scale: float = 1.0) -> dict[str, Any]:
    return document(
        [
            measured(
                Step(concurrency=2**power),
                round(300 * 1.5**power),
                scale * 0.001 * 1.4**power,
                40 * (power == 8),
            )
            for power in range(9)
        ]
    )


def opened(page: Chromium, path: Path, width: int, *, dark: bool = False) -> None:
    page.window(width, 900, dark=dark)
    page.open(path.as_uri())


def test_all_charts_and_tables(page: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, closed(), closed(1.3), "other.json")
    opened(page, path, 1400)
    for chart, lines in (("latency", 4), ("throughput", 1)):
        drawn = f"document.querySelectorAll('#{chart} .lineof').length"
        assert page.evaluate(drawn) == 2 * lines, "each has the line of the other test, too"
    assert page.evaluate("document.querySelectorAll('#breakdown .bar').length") == 3 * 9
    assert page.evaluate("document.querySelectorAll('#failures .bar').length") == 2
    assert page.evaluate("document.querySelectorAll('#distribution .bar').length") > 20
    assert page.evaluate("document.querySelectorAll('#rates .dot').length") == 2 * 5
    assert page.evaluate("document.querySelectorAll('#latencies .dot').length") == 2 * 5
    assert page.evaluate("document.querySelectorAll('#steps tr').length") == 9
    assert page.evaluate("document.querySelectorAll('#errors tbody tr').length") == 2
    changes = page.evaluate(
        "[...document.querySelectorAll('#compared tbody b')].map((one) => one.textContent)"
    )
    assert any(text.startswith("≈ ") for text in changes)
    assert any("-" in text for text in changes)
    # Texts with markup are shown as text.
    assert page.evaluate("document.getElementById('name').textContent") == HOSTILE
    assert HOSTILE in page.evaluate("document.querySelector('#errors tbody').textContent")
    assert "owned" not in page.evaluate(
        "document.title.replace(document.getElementById('name').textContent, '')"
    )
    assert "256 in flight: the client is the limit" in page.evaluate(
        "document.getElementById('warnings').textContent"
    )
    # The load with the most answers is chosen, until another is.
    assert page.evaluate("document.getElementById('chosen').textContent") == "256 in flight"
    page.evaluate("document.querySelector('#steps tr:nth-child(3) button').click()")
    assert page.evaluate("document.getElementById('chosen').textContent") == "4 in flight"
    assert page.evaluate("document.querySelectorAll('#batches .bar').length") == 4
    page.evaluate("document.querySelector('#choices button:nth-child(5)').click()")
    assert (
        page.evaluate("document.querySelector('#steps tr[aria-current] button').textContent")
        == "16 in flight"
    )
    assert page.requested == [path.as_uri()], "nothing else is loaded"


def test_it_fits_windows_of_any_width(page: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, closed(), closed(0.7), "other-" * 20)
    for width in (360, 768, 1400):
        opened(page, path, width, dark=width == 768)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        # As for a moment while windows are resized.
        page.window(60, 400)
        page.evaluate("render()")


@pytest.mark.parametrize("mode", ["open", "trace"])
def test_an_open_loop_without_figures_of_the_server(page: Chromium, tmp_path: Path, mode: str) -> None:
    steps = [measured(Step(rate=100.0) if mode == "open" else Step(), 100, 0.01, server=False)]
    path = tmp_path / "report.html"
    write_report(path, document(steps, mode))
    opened(page, path, 1280)
    assert page.evaluate("document.getElementById('compared').hidden")
    assert page.evaluate("document.getElementById('errors').hidden")
    assert page.evaluate("document.getElementById('choices').hidden")
    legend = "document.querySelector('#batches').parentElement.querySelector('.legend').textContent"
    assert "no figures of the server" in page.evaluate(legend)
    assert page.evaluate("document.getElementById('outcome').textContent") == "No request failed"
