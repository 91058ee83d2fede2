from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorferry.client.load.steps import Arrival
from tensorferry.client.load.trace import BadTrace, read_trace


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_of_seconds_and_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t", '{"at": 10.5, "rows": 4}', "", '{"at": 10}', '{"at": 12, "rows": 1, "x": 0}'
    )
    assert read_trace(path, 2) == (Arrival(0.0, 2), Arrival(0.5, 4), Arrival(2.0, 1))


def test_lines_of_the_access_log(tmp_path: Path) -> None:
    def line(time: str, **fields: object) -> str:
        return json.dumps({"time": time, "message": "method=ModelInfer", **fields})

    path = written(
        tmp_path / "log",
        line("2026-11-23T12:00:00.000Z", level="info"),
        line("2026-11-23T12:00:01.500Z", method="ModelInfer", duration_seconds=0.5, rows=3),
        line("2026-11-23T12:00:02.000Z", method="ModelInfer", duration_seconds=0.75, rows=2),
        line("2026-11-23T12:00:02.000Z", method="ModelInfer", duration_seconds=0.0, rows=None),
    )
    arrivals = read_trace(path, 1)
    assert [arrival.rows for arrival in arrivals] == [3, 2, 1]
    assert [arrival.at for arrival in arrivals] == pytest.approx([0, 0.25, 1])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nonsense", "line 2: expected"),
        ("[1]", "line 2: expected"),
        ('{"rows": 1}', "got None for the seconds"),
        ('{"at": "1"}', "got '1' for the seconds"),
        ('{"at": NaN}', "got nan for the seconds"),
        ('{"at": 1, "rows": 0}', "got 0 for the rows"),
        ('{"at": 1, "rows": true}', "got True for the rows"),
        ('{"time": "x", "message": "", "method": "ModelInfer", "duration_seconds": 1}', "expected an ISO 8601 time, got 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    with pytest.raises(BadTrace, match=text.replace("'", ".")):
        read_trace(written(tmp_path / "t", '{"at": 1}', line), 1)


def test_a_trace_without_arrivals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="has no arrivals"):
        read_trace(written(tmp_path / "t", '{"message": "started"}'), 1)
