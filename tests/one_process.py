"""Tests that hold only for a server of one process: with SERVER_PROCESSES they are skipped, for the reason given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]

_HELD_RUNS = "it holds runs and sees requests in the queue from inside the server's process"
_ONE_QUEUE = (
    "it counts what one queue, one batch or one process has, and each of several processes has its own"
)

# By file and function.
REASONS: Mapping[tuple[str, str], str] = {
    ("tests/e2e/failures/test_gpu_failures.py", "test_no_request_is_lost_where_the_device_is"): (
        "it is about `make gpu-check`, which expects that the server ends; one of several processes is replaced, which "
        "test_device_failure.py checks"
    ),
    **{
        (file, name): _ONE_QUEUE
        for file, names in {
            "tests/e2e/failures/test_thread_crashes.py": ("test_health_follows_each_crash_and_recovery",),
            "tests/e2e/test_lifecycle.py": ("test_killed_clients_leave_nothing_behind",),
            "tests/e2e/test_limits.py": (
                "test_a_client_has_its_part_and_others_theirs",
                "test_anonymous_clients_are_distinguished_by_address",
            ),
            "tests/e2e/test_metrics.py": (
                "test_failures_cancels_and_refusals",
                "test_refusals_before_a_queue_and_open_streams",
            ),
            "tests/e2e/functions/test_model_calls.py": ("test_a_call_has_the_deadline_of_its_client",),
            "tests/e2e/models/test_model_tables.py": ("test_each_model_has_the_options_of_its_table",),
            "tests/e2e/models/test_padding.py": ("test_lengths_share_batches_and_answers_are_those_alone",),
            "tests/e2e/functions/test_python_models.py": ("test_functions_and_pipelines_are_served",),
            "tests/e2e/test_status.py": ("test_an_answered_request_is_in_its_recorded_batch",),
            "tests/wire/http/test_lifecycle.py": ("test_accepted_requests_are_answered_before_the_end",),
            "tests/wire/http/test_tritonclient.py": ("test_a_full_queue",),
            "tests/wire/triton/test_triton_semantics.py": ("test_overload",),
        }.items()
        for name in names
    },
    **{
        ("tests/wire/triton/test_configured_models.py", name): _HELD_RUNS
        for name in (
            "test_a_queue_timeout_is_reported_while_the_model_runs",
            "test_a_request_may_set_a_shorter_timeout_if_the_policy_allows_it",
            "test_a_requests_timeout_is_ignored_if_the_policy_does_not_allow_it",
            "test_priorities_are_strict",
        )
    },
}


def skip(items: Sequence[pytest.Item]) -> None:
    """Skip these tests. AssertionError if the table names one that does not exist."""
    for file, name in REASONS:
        assert f"def {name}(" in (_ROOT / file).read_text(), f"{file} has no {name}"
    for item in items:
        function = item.name.partition("[")[0]
        reason = REASONS.get((item.path.relative_to(_ROOT).as_posix(), function))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"one process only: {reason}"))
