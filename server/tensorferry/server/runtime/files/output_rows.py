"""Correction of outputs that are declared with one row but have a row for each row of the inputs.

Some exporters declare a classifier's label this way, for instance onnxmltools for LightGBM.
"""

from __future__ import annotations

from dataclasses import replace

from tensorferry.server.runtime.checks.sampling import Run, random_inputs, working_size
from tensorferry.server.signature import Signature

# Numbers of rows that are tried. An output with a fixed number of rows cannot match both.
_ROWS = (2, 3)


def with_output_rows(signature: Signature, run: Run) -> Signature:
    """Return the signature with such outputs corrected: their first dimension varies with the rows.

    The model runs only if such an output is possible: every input's first dimension varies, and an output has one row.
    """
    fixed = {spec.name for spec in signature.outputs if spec.dims[:1] == (1,)}
    leading = [spec.dims[:1] for spec in signature.inputs]
    if not fixed or not leading or any(not dims or isinstance(dims[0], int) for dims in leading):
        return signature
    size, _ = working_size(signature, run)
    if size is None:
        return signature
    try:
        for rows in _ROWS:
            outputs = run(random_inputs(signature, rows, size))
            fixed = {name for name in fixed if outputs[name].shape[:1] == (rows,)}
    except Exception:
        # The model does not run with several rows.
        return signature
    batch = signature.inputs[0].dims[0]
    return replace(
        signature,
        outputs=tuple(
            replace(spec, dims=(batch, *spec.dims[1:]), counts_rows=True) if spec.name in fixed else spec
            for spec in signature.outputs
        ),
    )
