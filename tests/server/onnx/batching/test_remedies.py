"""Every reason for which a model is not batched has a remedy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorferry.server.onnx import graph as onnx_graph
from tensorferry.server.onnx.batching.remedies import batch_axis_remedy, has_specific_remedy, remedies_for
from tensorferry.server.signature import Signature

# Functions whose last argument is the start of a reason that ends in "the batch axis".
_STARTS = ("reject_rows_on", "rows_on_axes", "rows_on_first_axis")


def texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression can have; a number or name in it is 7."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)


def reasons_of_mixing() -> list[str]:
    """Return what the rules of the graph analysis say of nodes that mix rows, from their source."""
    found: set[str] = set()
    for path in Path(onnx_graph.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if node.func.id == "MixesRows":
                found.update(text for argument in given for text in texts(argument))
            elif node.func.id in _STARTS:
                found.update(f"{text} the batch axis" for argument in given[1:] for text in texts(argument))
    return sorted(found - {"7 the batch axis"})


def test_what_a_node_does_to_rows_has_a_remedy_of_its_own() -> None:
    reasons = reasons_of_mixing()
    assert {
        "reduces over the batch axis",
        "removes the batch axis",
        "splits the batch axis across rows, 7",
    } <= {*reasons}
    assert [reason for reason in reasons if not has_specific_remedy(f"Operator name {reason}")] == []


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("ReduceMean m reduces over the batch axis", "x.mean(dim=1)"),
        ("BatchNormalization b normalises over the batch axis, because it is in training mode", "model.eval()"),
        ("NonMaxSuppression y computes a shape that depends on the rows' values", "without NMS"),
        ("Reshape r splits the batch axis across rows, [1, 8]", "x.view(x.shape[0], -1)"),
        ("LSTM l runs along the batch axis", "batch_first=True"),
        ("output y does not follow the batch axis: it is the same for all rows", "leave this output out"),
        ("output 'y' has shape [3] for 5 rows: it does not follow the batch axis", "behind the model"),
        ("output 'y' of one row differs from run to run: by 1", "random numbers"),
        ("it runs one row, but not several together (bad shape)", "variable first axis"),
        ("it is only tested, and --batching proved batches only proved models: x", "--batching tested"),
        ("the file does not say how many dimensions input 'x' has", "config.pbtxt"),
        ("--max-batch-size 0", "leave it out"),
    ],
)  # fmt: skip
def test_a_reason_leads_to_its_remedy(reason: str, word: str) -> None:
    (remedy,) = remedies_for([reason])
    assert word in remedy
    assert "\n" not in remedy


def test_a_remedy_is_named_once_and_general_ones_only_alone() -> None:
    ran = "output 'y' of a row depends on other rows: by 1"
    assert "let each row" in remedies_for([ran])[0]
    (static,) = remedies_for([ran], ["MatMul", "DynamicQuantizeLinear"])
    assert "quantize_static" in static
    mean = "ReduceMean a reduces over the batch axis"
    assert remedies_for([mean, mean.replace("a", "b"), "Odd o does what is unknown"]) == remedies_for([mean])
    assert remedies_for(["Odd o does what is unknown"])[0].startswith("change the named node")


def test_there_is_no_axis_to_make_variable_without_a_fixed_one() -> None:
    assert batch_axis_remedy(Signature((), ())) == ""
