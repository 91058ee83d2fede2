"""The dashboard equals its generator's output, uses existing metrics, and every panel shows data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import dashboard
from deploy.promql import Page, mistakes
from deploy.promtool import check_expressions, needs_promtool, without_answer

from tensorferry.server.observability.monitoring.metrics.metric_names import ModelMetric

DOCS = Path(__file__).resolve().parents[2] / "docs"


def expressions() -> dict[str, str]:
    """Return the expressions of the file by panel title, with everything selected in the variables."""
    found = {}
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "5m")
            for variable in ("$job", "$instance", "$model"):
                expr = expr.replace(f'=~"{variable}"', '=~".+"')
            assert "$" not in expr
            found[f"{panel['title']} {target['refId']}"] = expr
    return found


def documented() -> Iterator[str]:
    """Return the queries in the documentation."""
    for page in DOCS.rglob("*.md"):
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            if re.search(r"\b(?:rate|sum|histogram_quantile)\s*(?:by|\()", code) and "tensorferry_" in code:
                yield code.replace("\\|", "|")


def test_the_file_equals_the_generators_output() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run python deploy/grafana/dashboard.py"


def test_the_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_names_existing_series(page: Page) -> None:
    wrong = {title: [*mistakes(expr.replace(".+", "m"), page)] for title, expr in expressions().items()}
    assert not {title: found for title, found in wrong.items() if found}
    queries = [
        variable["definition"]
        for variable in json.loads(dashboard.FILE.read_text())["templating"]["list"]
        if variable["type"] == "query"
    ]
    for query in queries:
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in page.labels[metric]


def test_the_documentation_names_existing_series(page: Page) -> None:
    found = {query: [*mistakes(query, page)] for query in documented()}
    assert len(found) >= 5
    assert not {query: wrong for query, wrong in found.items() if wrong}
    for file in DOCS.rglob("*.md"):
        for name in re.findall(r"`(tensorferry_[a-z_]+)`", file.read_text()):
            if name == "tensorferry_status":
                # A parameter of a response.
                continue
            histogram = re.sub(r"_(bucket|sum|count)$", "", name)
            # Some metrics are those of models that the server of this test does not have.
            known = page.labels.keys() | {metric.on_page for metric in ModelMetric}
            assert {name, f"{histogram}_bucket"} & known, (file.name, name)


@needs_promtool
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    assert check_expressions(tmp_path, ["rate(x[5m]"])
    assert not check_expressions(tmp_path, [*expressions().values(), *documented()])


@needs_promtool
def test_every_query_says_something_of_a_real_servers_page(tmp_path: Path, page: Page) -> None:
    assert without_answer(tmp_path, ['tensorferry_server_info{transport="none"}'], page.series)
    assert not without_answer(tmp_path, [*expressions().values(), *documented()], page.series)
