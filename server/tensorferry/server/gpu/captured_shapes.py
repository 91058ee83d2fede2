"""The shapes of batch for which a model's CUDA graphs are captured, from what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorferry.batcher.learning.calibration import powers_of_two
from tensorferry.server.errors import StartError
from tensorferry.server.gpu.cuda_graphs import GraphOptions, GraphSpec
from tensorferry.server.gpu.tensor_layout import Shape
from tensorferry.server.signature import Signature


def shapes_to_capture(
    graphs: GraphOptions, signature: Signature, max_batch_size: int, lengths: Sequence[Mapping[str, int]]
) -> list[Mapping[str, Shape]]:
    """The shapes of the inputs of each rung, ascending by rows.

    `lengths` are those that the model's inputs are padded to, by the names of axes, or one that has none. StartError
    names what was asked for and does not fit the model, or what else has to be said.
    """
    sizes = powers_of_two(max_batch_size) if max_batch_size else (0,)
    if not graphs.required and graphs.specs:
        # The flag is for every model of the server.
        sizes = tuple(spec.rows for spec in graphs.specs if spec.rows <= max_batch_size) or (max_batch_size,)
    specs = graphs.specs if graphs.required and graphs.specs else tuple(map(GraphSpec, sizes))
    rungs: dict[tuple[Shape, ...], Mapping[str, Shape]] = {}
    for spec in sorted(specs, key=lambda spec: spec.rows):
        if (spec.rows == 0) != (max_batch_size == 0) or spec.rows > max_batch_size:
            raise StartError(
                f"a graph_spec has batch_size {spec.rows}; max_batch_size is {max_batch_size}: it must be "
                + (f"from 1 to {max_batch_size}" if max_batch_size else "left out")
            )
        for named in lengths:
            shapes = _shapes(spec, signature, max_batch_size > 0, named)
            rungs[tuple(shapes.values())] = shapes
    return list(rungs.values())


def _shapes(
    spec: GraphSpec, signature: Signature, batched: bool, named: Mapping[str, int]
) -> dict[str, Shape]:
    given = dict(spec.dims)
    unknown = given.keys() - {tensor.name for tensor in signature.inputs}
    if unknown:
        raise StartError(
            f"a graph_spec has the inputs {sorted(unknown)}; the model's are "
            f"{', '.join(tensor.name for tensor in signature.inputs)}"
        )
    shapes: dict[str, Shape] = {}
    for tensor in signature.inputs:
        dims = tensor.dims[1:] if batched else tensor.dims
        shape = given.get(tensor.name)
        if shape is None:
            shape = tuple(dim if isinstance(dim, int) else named.get(dim, -1) for dim in dims)
        if len(shape) != len(dims) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
        ):
            raise StartError(
                f"a graph_spec gives input {tensor.name!r} the shape {list(shape)}; the model takes "
                f"{[dim if isinstance(dim, int) else -1 for dim in dims]}"
            )
        if -1 in shape:
            raise StartError(
                f"input {tensor.name!r} has dimensions that vary, {list(tensor.shape)}: name those of each graph in "
                "the configuration's optimization { cuda { graph_spec { input { ... } } } }, or pad it by --pad-lengths"
            )
        shapes[tensor.name] = (spec.rows, *shape) if batched else shape
    return shapes
