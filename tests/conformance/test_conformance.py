"""Some of the onnx package's backend tests through real servers; `make conformance` runs all.

They are chosen for every datatype, scalars, no inputs, no rows, batch axes, and axes that only look
like batch axes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.alone import excluded
from conformance.cases import Case, node_cases, opened
from conformance.wire import WINDOW, model_name, serving

# Modules of the onnx package's node tests, and the cases taken of each.
CHOSEN = {
    "add": "add add_int8 add_uint16 add_uint64 add_bcast", "and_": "and_bcast4v4d",
    "castlike": "castlike_FLOAT16_to_DOUBLE castlike_FLOAT_to_BFLOAT16", "clip": "clip_default_int8_min",
    "concat": "concat_2d_axis_0", "constant": "constant", "constantofshape": "constantofshape_int_shape_zero",
    "conv": "basic_conv_with_padding", "cumsum": "cumsum_2d_axis_0", "eyelike": "eyelike_with_dtype",
    "gather": "gather_0", "gru": "gru_bidirectional", "matmul": "matmul_2d", "reducemax": "reduce_max_bool_inputs",
    "scan": "scan9_sum", "shape": "shape", "softmax": "softmax_axis_0 softmax_axis_1",
    "split": "split_zero_size_splits_opset13", "string_concat": "string_concat_zero_dimensional string_concat_utf8",
    "stringnormalizer": "strnormalizer_export_monday_casesensintive_nochangecase", "topk": "top_k",
    "transpose": "transpose_default", "where": "where_long_example",
}  # fmt: skip
NAMES = {f"test_{name}" for names in CHOSEN.values() for name in names.split()}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return the chosen cases, unchanged and with dynamic first axes."""
    taken = [case for case in node_cases(CHOSEN) if case.name in NAMES]
    assert {case.name for case in taken} == NAMES
    return taken + [variant for variant in map(opened, taken) if variant is not None]


def test_through_a_server_as_by_onnx_runtime_alone(cases: list[Case], transport: str, tmp_path: Path) -> None:
    chosen = [case for case in cases if excluded(case) is None]
    # ONNX Runtime itself may not run a model with dynamic axes.
    assert {case.name for case in chosen} >= NAMES
    with serving(chosen, tmp_path, *WINDOW, transport=transport) as asking:
        verdicts = {model_name(case): asking.judge(case) for case in chosen}
    assert {name: verdict.wrong for name, verdict in verdicts.items() if verdict.wrong} == {}
    assert any(verdict.batch_requests > 1 for verdict in verdicts.values())
    # The rows of this one are on axis 1, whose size in the file is 1.
    as_in_the_file = {name for name in verdicts if not name.endswith(".open")}
    assert {name for name in as_in_the_file if verdicts[name].batched} == {"node.test_gru_bidirectional"}
    refused = {name for name, verdict in verdicts.items() if verdict.refused}
    assert refused == {"node.test_and_bcast4v4d.open"}
    for name in (
        "cumsum_2d_axis_0",
        "softmax_axis_0",
        "gather_0",
        "transpose_default",
        "reduce_max_bool_inputs",
        # Drops a row for each stop word.
        "strnormalizer_export_monday_casesensintive_nochangecase",
    ):
        verdict = verdicts.get(f"node.test_{name}.open")
        assert verdict is None or not verdict.batched, name
    assert verdicts["node.test_softmax_axis_1.open"].batched
