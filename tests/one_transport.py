"""Tests of what lies behind the transports, or beside them: they run on one transport.

With TRANSPORTS="threaded lane", as in CI, they run on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]

KEPT = "lane"

_LOADING = (
    "it is about how models are loaded, checked and run, which both transports leave to the same service"
)
_DEVICES = "it is about devices that fail, which the batcher handles behind both transports"
_METHODS = "it is about methods that are the same with both transports"
_CLIENT = "it is about the client"
_FOREIGN = (
    "it is about clients in other languages, to which both transports speak with gRPC's core; tritonclient has its calls "
    "on both"
)
_PROCESSES = "it is about the processes of a server, which may have either transport"
_SIGNALS = "it is about the main thread, which stops both transports in one way"
_TLS = "it is about TLS, which gRPC's core has below both transports"

# By file, or file::function.
REASONS: Mapping[str, str] = {
    "tests/browser/test_status_page.py": "it is about the page, whose figures come from the batcher",
    "tests/conformance/test_conformance.py": _LOADING,
    "tests/deploy/test_round_robin.py": "it is about the balancing of grpcio's client",
    "tests/e2e/failures/test_device_failure.py": _DEVICES,
    "tests/e2e/failures/test_pushback.py": _CLIENT,
    "tests/e2e/failures/test_thread_crashes.py::test_health_follows_each_crash_and_recovery": _DEVICES,
    "tests/e2e/failures/test_thrown_exceptions.py": "it is about threads of the product, which both transports have",
    "tests/e2e/failures/test_unread_log.py": "it is about the log",
    "tests/e2e/models/test_batching_check.py": _LOADING,
    "tests/e2e/clients/test_bench.py": _CLIENT,
    "tests/e2e/clients/test_client.py::test_parts_give_the_results_of_the_whole": _CLIENT,
    "tests/e2e/models/test_custom_operators.py": _LOADING,
    "tests/e2e/examples/test_digits.py": _LOADING,
    "tests/e2e/models/test_fixed_first_axis.py": _LOADING,
    "tests/e2e/models/test_fp16.py": _LOADING,
    "tests/e2e/examples/test_images.py": _LOADING,
    "tests/e2e/clients/test_infer_command.py": _CLIENT,
    "tests/e2e/clients/test_inspect.py": _LOADING,
    "tests/e2e/test_lifecycle.py::test_a_second_signal_stops_at_once": _SIGNALS,
    "tests/e2e/test_lifecycle.py::test_a_server_that_is_gone_is_unavailable": _CLIENT,
    "tests/e2e/test_lifecycle.py::test_signals_directly_after_each_other_are_one": _SIGNALS,
    "tests/e2e/test_metrics.py::test_a_port_in_use_ends_the_server_with_the_flags_name": (
        "it is about the port of the metrics"
    ),
    "tests/e2e/functions/test_model_calls.py": _LOADING,
    "tests/e2e/models/test_model_tables.py": _LOADING,
    "tests/e2e/test_otel_export.py::test_a_collector_that_hangs_delays_no_request_and_the_stop_for_a_bounded_time": (
        "it is about the exporter, for which the stop waits five seconds"
    ),
    "tests/e2e/models/test_padding.py": _LOADING,
    "tests/e2e/test_processes.py": _PROCESSES,
    "tests/e2e/functions/test_python_models.py": _LOADING,
    "tests/e2e/test_security.py::test_no_secret_is_shown_anywhere": "it is about files, logs and commands",
    "tests/e2e/clients/test_several_targets.py": _CLIENT,
    "tests/hostile/test_resets.py::test_with_the_legacy_listener_they_end_at_the_age_of_connections": (
        "it is about gRPC's core, which has the connections of both transports"
    ),
    "tests/wire/shapes/test_empty_axes.py": _LOADING,
    "tests/wire/shapes/test_signatures.py": _LOADING,
    "tests/wire/shapes/test_zero_rows.py": "it is about requests that no transport runs: the service answers them",
    "tests/wire/test_cuda_shared_memory.py": (
        "it is about memory of a GPU; test_shared_memory.py has the memory of the system on both transports"
    ),
    "tests/wire/test_generated_clients.py": _FOREIGN,
    "tests/wire/test_grpcurl.py": _FOREIGN,
    "tests/wire/test_kserve.py": _FOREIGN,
    "tests/wire/test_log_settings.py": _METHODS,
    "tests/wire/test_model_config.py": _METHODS,
    "tests/wire/test_repository.py": _METHODS,
    "tests/wire/test_secured.py": _TLS,
    "tests/wire/test_strings.py": _LOADING,
    "tests/wire/triton/test_configured_models.py": "it is about configurations, which the queues of both transports follow",
    "tests/wire/triton/test_ensembles.py": _LOADING,
    "tests/wire/triton/test_example_repositories.py": _LOADING,
    "tests/wire/triton/test_perf_analyzer.py": _FOREIGN,
}


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return these tests on the other transport. AssertionError if the table names what does not exist."""
    for place in REASONS:
        file, _, name = place.partition("::")
        assert f"def {name}" in (_ROOT / file).read_text(), f"{place} does not exist"
    return [
        item for item in items if _transport(item) != KEPT and not REASONS.keys().isdisjoint(_places(item))
    ]


def _transport(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return KEPT if callspec is None else callspec.params.get("transport", KEPT)


def _places(item: pytest.Item) -> tuple[str, str]:
    file = item.path.relative_to(_ROOT).as_posix()
    return file, f"{file}::{item.name.partition('[')[0]}"
