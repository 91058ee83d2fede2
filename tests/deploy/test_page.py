"""A real server's page of metrics, as Prometheus parses it."""

from __future__ import annotations

import re

import pytest
from deploy.conftest import TRACE, scrape
from deploy.promtool import needs_promtool, promtool
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.processes.server import ServerProcess

# The header that current versions of Prometheus send.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@needs_promtool
def test_promtool_finds_nothing_wrong_with_it(server: ServerProcess) -> None:
    """Except for Triton's metric names, which are given."""
    text, content_type = scrape(server)
    assert content_type == TEXT
    ours = re.sub(r"^(# (HELP|TYPE) )?nv_.*\n", "", text, flags=re.MULTILINE)
    assert "tensorferry_latency_seconds_bucket" in ours
    checked = promtool("check", "metrics", stdin=ours)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stderr == ""
    # promtool parses the whole page, and reports nothing else.
    complaints = promtool("check", "metrics", stdin=text).stderr.splitlines()
    assert complaints
    assert all(line.startswith("nv_") for line in complaints)


def test_prometheus_gets_openmetrics_with_the_traced_request(server: ServerProcess) -> None:
    text, content_type = scrape(server, PROMETHEUS)
    assert content_type == OPENMETRICS
    families = {family.name: family for family in text_string_to_metric_families(text)}
    buckets = families["tensorferry_latency_seconds"].samples
    (traced,) = [sample for sample in buckets if sample.exemplar is not None]
    assert traced.name == "tensorferry_latency_seconds_bucket"
    assert traced.exemplar is not None
    assert traced.exemplar.labels == {"trace_id": TRACE}
    assert 0 < traced.exemplar.value <= float(traced.labels["le"])
    assert sum(sample.value for sample in buckets if sample.name.endswith("_count")) == 4
    assert not [
        s for family in families.values() if family.type != "histogram" for s in family.samples if s.exemplar
    ]
    triton = families["nv_inference_request_success"]
    assert triton.type == "unknown"
    assert {sample.name for sample in triton.samples} == {"nv_inference_request_success"}
    assert sum(sample.value for sample in triton.samples) == 4


def test_both_formats_have_the_same_series(server: ServerProcess) -> None:
    def series(text: str) -> set[str]:
        return {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    text, openmetrics = scrape(server)[0], scrape(server, PROMETHEUS)[0]
    assert "# {" not in text
    assert openmetrics.endswith("# EOF\n")
    assert series(text) == series(openmetrics)


@pytest.mark.parametrize(
    "accept", ["text/plain; version=x", "*/*", "text/html, application/xml;q=0.9", "nonsense;;,"]
)
def test_others_get_the_text_format(server: ServerProcess, accept: str) -> None:
    assert scrape(server, accept)[1] == TEXT


@pytest.mark.parametrize("version", ['"1.0.0"', "2.x"])
def test_openmetrics_has_the_servers_version(server: ServerProcess, version: str) -> None:
    assert scrape(server, f"application/openmetrics-text; version={version}")[1] == OPENMETRICS
