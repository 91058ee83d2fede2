"""The graph analysis compared with runs, for some node tests; `make batching-evidence` takes all."""

from __future__ import annotations

import onnx
import pytest
from conformance.batching import Model, compare, variants
from conformance.cases import node_cases
from conformance.exported import Exported, exported

from tensorferry.server.onnx.graph import RowMixing
from tensorferry.server.onnx.graph.analysis import analysis_of

MODULES = [
    "argmax", "batch_normalization", "concat", "conv", "cumsum", "einsum", "expand", "flatten", "gather",
    "gathernd", "gru", "if_", "layernormalization", "loop", "lstm", "matmul", "maxpool", "onehot", "pad",
    "reducemax", "reshape", "scan", "slice", "softmax", "split", "squeeze", "tile", "transpose",
]  # fmt: skip


def test_nothing_that_mixes_rows_is_proved_and_nearly_all_else_is() -> None:
    found = [compare(model) for case in node_cases(MODULES) for model in variants(case)]
    ran = [one for one in found if one.mixing is not None]
    proved = [one for one in ran if one.analysis.finding is RowMixing.SEPARATE]
    assert [(one.name, one.mixing) for one in proved if one.mixing] == []
    apart = [one for one in ran if not one.mixing]
    assert len(ran) > 120
    assert len(proved) > 0.9 * len(apart)


def test_attributes_that_are_left_out_have_the_defaults_of_onnx() -> None:
    added = 0
    for case in node_cases(MODULES):
        for model in variants(case):
            found = analysis_of(model.model, model.rows)
            versions = {one.domain: one.version for one in model.model.opset_import}
            for node in model.model.graph.node:
                schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
                given = {one.name for one in node.attribute}
                defaults = [one.default_value for one in schema.attributes.values() if one.name not in given]
                node.attribute.extend(one for one in defaults if one.type)
                added += len(defaults)
            assert analysis_of(model.model, model.rows).finding is found.finding, case.name
    assert added > 300


@pytest.mark.parametrize("one", exported(), ids=lambda one: one.name)
def test_models_as_exporters_make_them(one: Exported) -> None:
    found = compare(Model(one.name, one.model, one.rows))
    assert found.analysis.finding is one.finding, found.analysis.reasons
    if one.name != "sklearn_text":  # It needs a locale that the machine may lack.
        assert found.mixing == "" if one.finding is RowMixing.SEPARATE else found.mixing
