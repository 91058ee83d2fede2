"""The graph analysis compared with runs, for some node tests; `make batching-evidence` takes all."""

from __future__ import annotations

import onnx
from conformance.batching import Model, compare, variants
from conformance.cases import node_cases
from conformance.exported import exported

from tensorferry.server.onnx.graph import RowMixing
from tensorferry.server.onnx.graph.analysis import analysis_of

MODULES = [
    "concat", "cumsum", "einsum", "gather", "gru", "if_", "layernormalization", "loop", "pad", "reducemax", "reshape", "scan",
    "softmax", "split", "transpose",
]  # fmt: skip


def test_nothing_that_mixes_rows_is_proved_and_nearly_all_else_is() -> None:
    found = [compare(model) for case in node_cases(MODULES) for model in variants(case)]
    ran = [one for one in found if one.mixing is not None]
    proved = [one for one in ran if one.analysis.finding is RowMixing.SEPARATE]
    assert [(one.name, one.mixing) for one in proved if one.mixing] == []
    apart = [one for one in ran if not one.mixing]
    assert len(ran) > 60
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
    assert added > 100


def test_models_as_exporters_make_them() -> None:
    compared = [(one, compare(Model(one.name, one.model, one.rows))) for one in exported()]
    assert {one.name: found.analysis.finding for one, found in compared} == {
        one.name: one.finding for one, _ in compared
    }
    # One needs a locale that the machine may lack.
    ran = [(one, found.mixing) for one, found in compared if one.name != "sklearn_text"]
    proved = {one.name: mixing for one, mixing in ran if one.finding is RowMixing.SEPARATE}
    assert proved == dict.fromkeys(proved, "")
    assert all(mixing for one, mixing in ran if one.finding is not RowMixing.SEPARATE)
