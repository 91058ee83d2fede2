"""Remedies: what to change in a model, or in its export, so that its requests share batches.

Each reason for which a model is not batched belongs to a family, found by its words. A family has one remedy. The reasons
are those of the graph analysis, of the comparison of runs, of the signature and of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from tensorferry.server.signature import Signature, TensorSpec

_STATIC_QUANTISATION = "quantise it statically, with constant scales: onnxruntime.quantization.quantize_static instead of quantize_dynamic"
_VARIABLE_SIZES = (
    "a number of rows is fixed inside the graph: export it with a variable first axis, and take sizes from the input, as "
    "x.view(x.shape[0], -1) or torch.flatten(x, 1) do"
)
_OWN_AXES = "compute over the axes of one row, such as x.mean(dim=1) instead of x.mean(), or softmax(dim=-1) instead of dim=0"
_BEHIND_THE_MODEL = (
    "return one row for each input row, and do behind the model what depends on all of them, such as a function of "
    "tensorferry.serving"
)

# The first pattern that a reason matches decides.
_FAMILIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        # Operators.
        (r"dynamic quantisation|^Dynamic\w*Quantize", _STATIC_QUANTISATION),
        (
            r"training mode",
            "export it in evaluation mode: model.eval() before torch.onnx.export, without TrainingMode.TRAINING",
        ),
        (
            r"^NonMaxSuppression|selects the image of each region|crops over the batch",
            "export it without NMS and region crops (nms=False in many exporters): return the boxes and scores of each "
            "image, and select from them behind the model, such as in a function of tensorferry.serving",
        ),
        (r"reduces the loss", "export it without the loss: return the predictions alone"),
        (
            r"removes strings|as the longest string|takes strings that|reads one file|n-grams along",
            "prepare texts and files in front of the model, such as in a tokenizer or a function of tensorferry.serving",
        ),
        (
            r"chooses one branch|repeats its body|ends its body's|depends on the branch|changes in each iteration",
            "decide for each row: torch.where instead of if, and loops of a fixed length",
        ),
        (
            r"passes values of one row on",
            "the loop goes over the first axis: let it begin each row with the same values, or go over an axis of the row",
        ),
        (
            r"is of an old version|attributes of an old version",
            "convert it to a newer opset: onnx.version_converter.convert_version(model, 21)",
        ),
        # Outputs.
        (
            r"it is the same for all rows",
            "leave this output out of the export, or compute it from each row's input",
        ),
        (
            r"the rows are on its axis",
            "transpose this output so that its first axis counts the rows (batch_first=True in PyTorch's layers)",
        ),
        (
            r"its axis 0 has the size|for \d+ rows: it does not follow",
            f"let the first axis of this output count the rows of the input: {_BEHIND_THE_MODEL}",
        ),
        # What a node does to the batch axis.
        (
            r"runs along the batch axis|^(RNN|GRU|LSTM)\b.* the batch axis",
            "the layer takes the first axis as time: batch_first=True in PyTorch, or transpose its input and output",
        ),
        (
            r"joins ",
            "join along an axis behind the batch axis: torch.cat(..., dim=1), with constants expanded to x.shape[0] rows",
        ),
        (
            r"number of rows in the batch|per row of the batch|makes the rows' values depend",
            "leave the number of rows, x.shape[0], out of what is computed: use a constant or the size of another axis",
        ),
        (
            r"removes the batch axis|removes axes depending",
            "name the axis that is removed: x.squeeze(1) instead of x.squeeze()",
        ),
        (
            r"a part of the batch axis|fixed positions of the batch|elements along the batch|puts (elements|rows) |"
            r"pads? the batch axis|crop the batch axis",
            "take parts behind the batch axis: x[:, 0] instead of x[0]",
        ),
        (
            r"splits the batch axis|moves the batch axis|stretches the batch|resizes? the batch|"
            r"the batch axis with an? (fixed )?axis|batch axis of another size|has the size|another number of rows|"
            r"not several together",
            _VARIABLE_SIZES,
        ),
        (
            r"rows along (one|another) axis|one row with another|rows with one of them|diagonal|from all rows|"
            r"mask of one row|row's index|"
            r"indices of rows|through the whole batch|merged with other axes",
            "rows are compared with each other: return one result for each row, such as its embedding, and compare the "
            "results behind the model",
        ),
        (r"(over|along|across|round|for) the batch axis", _OWN_AXES),
        (
            r"shape that depends on the rows' values",
            "keep sizes the same for all values: masks and torch.where instead of boolean indexing, NonZero, Unique or "
            "Compress",
        ),
        # Running.
        (
            r"differs from run to run|is random",
            "take random numbers out of the graph: model.eval() before the export, or noise as an input of the model",
        ),
        (
            r"does not run on random input|runs on few random inputs",
            "if you know that its rows are independent, say so: --batching trust, or dynamic_batching { } in its config.pbtxt",
        ),
        (
            r"of a row depends on other rows",
            f"let each row of an output depend on the same input row alone: {_OWN_AXES}",
        ),
        # Files, options and configuration.
        (r"only tested, and --batching proved", "allow tested models: --batching tested"),
        (r"ONNX Runtime's own format", "serve the .onnx file from which the .ort file was made"),
        (
            r"has a default",
            "make the input required: remove its initializer from the graph",
        ),
        (
            r"without a shape|unknown rank|how many dimensions",
            "export it with the shapes of its inputs, or give their dims in its config.pbtxt",
        ),
        (
            r"is a scalar",
            "give this tensor a first axis that counts the rows, such as keepdim=True or reshape(-1)",
        ),
        (r"^--max-batch-size 0", "give --max-batch-size a number of rows, or leave it out"),
        (r"^max_batch_size is 0", "set max_batch_size in its configuration, or leave it out there"),
        (r"has no dynamic_batching", "add 'dynamic_batching { }' to its config.pbtxt"),
    )
)
# For reasons of no family.
_OTHERWISE = (
    "change the named node or output so that each row depends on the same input row alone; if it does, --batching trust "
    "says so"
)


def remedies_for(reasons: Iterable[str], operators: Collection[str] = ()) -> tuple[str, ...]:
    """Return what to change so that a model is batched that is not for these reasons; each remedy once.

    `operators` are those of its graph, because running does not show which operator makes rows differ.
    """
    found: dict[str, None] = {}
    if any("DynamicQuantize" in operator for operator in operators):
        found[_STATIC_QUANTISATION] = None
    for reason in reasons:
        found[_remedy_of(reason) or _OTHERWISE] = None
    # The general remedies help only if no other is known.
    specific = [
        remedy for remedy in found if not (remedy == _OTHERWISE or remedy.endswith(f"alone: {_OWN_AXES}"))
    ]
    return tuple(specific or found)


def _remedy_of(reason: str) -> str | None:
    return next((remedy for pattern, remedy in _FAMILIES if pattern.search(reason)), None)


def has_specific_remedy(reason: str) -> bool:
    """Return whether the reason belongs to a family."""
    return _remedy_of(reason) is not None


def batch_axis_remedy(signature: Signature) -> str:
    """Return how to make the first axis variable; empty if no first axis is fixed."""
    inputs, outputs = fixed_first_axes(signature.inputs), fixed_first_axes(signature.outputs)
    if not inputs and not outputs:
        return ""
    if any(spec.has_row_axis for spec in signature.inputs) and outputs:
        names = " and ".join(repr(spec.name) for spec in outputs)
        return (
            f"let the first axis of output {names} count the rows of the input: take sizes from the input, as "
            "torch.flatten(x, 1) does, and return one row for each row; or leave the output out of the export"
        )
    # Only inputs have shapes there; those of outputs follow.
    shapes = f"dynamic_shapes={_axes(inputs)}, or " if inputs else ""
    return (
        f"export it with a variable first axis: torch.onnx.export(..., {shapes}dynamic_axes={_axes(inputs + outputs)} with "
        "dynamo=False); a batch size of None in other exporters"
    )


def fixed_first_axes(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors whose first dimension is a number."""
    return [spec for spec in specs if spec.dims and isinstance(spec.dims[0], int)]


def _axes(specs: Iterable[TensorSpec]) -> str:
    return f"{{{', '.join(f'{spec.name!r}: {{0: {chr(39)}batch{chr(39)}}}' for spec in specs)}}}"
