"""Alert rules: Prometheus can parse them, each fires when it should, and they name existing metrics."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.promql import Page, mistakes
from deploy.promtool import needs_promtool, promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = (FOLDER / "alerts.yml").read_text()
TESTS = (FOLDER / "alerts_test.yml").read_text()


def alerts() -> dict[str, str]:
    """Return the expression of each."""
    found = {}
    for rule in RULES.split("- alert: ")[1:]:
        name, rest = rule.split("\n", 1)
        match = re.search(r"^ +expr: (?:\|\n)?(.*?)^ +(?:for|labels):", rest, re.DOTALL | re.MULTILINE)
        assert match is not None, name
        found[name] = match[1]
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, as web pages have them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@needs_promtool
def test_prometheus_reads_them_and_finds_no_fault() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml", cwd=FOLDER)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(alerts())} rules found" in checked.stdout


@needs_promtool
def test_each_fires_when_it_should_and_none_when_all_is_well() -> None:
    tested = promtool("test", "rules", "alerts_test.yml", cwd=FOLDER)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    fired = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n", TESTS)
    assert set(fired) == set(alerts())


def test_they_name_metrics_and_labels_that_exist(page: Page) -> None:
    wrong = {name: [*mistakes(expr, page)] for name, expr in alerts().items()}
    assert not {name: found for name, found in wrong.items() if found}


def test_each_has_a_runbook_that_is_there() -> None:
    runbooks = re.findall(r"runbook: (\S+)#(\S+)", RULES)
    assert [anchor for _, anchor in runbooks] == [name.lower() for name in alerts()]
    for page, anchor in runbooks:
        assert anchor in anchors(ROOT / page)
