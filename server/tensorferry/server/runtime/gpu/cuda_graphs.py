"""CUDA graphs: the batch shapes that are captured, and the captured shape that a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher.learning.paying_rows import powers_of_two
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError, StartError
from tensorferry.server.runtime.gpu.tensor_layout import Shape
from tensorferry.server.signature import Signature


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Requested graph: its rows (0 for a model without a batch axis) and the inputs' other dimensions.

    `dims` names only the inputs whose other dimensions vary.
    """

    rows: int
    dims: tuple[tuple[str, Shape], ...] = ()


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Requested CUDA graphs. Without `specs`, one graph for each power of two up to max_batch_size.

    `required` is true if the model's own configuration requests them; loading then fails without them.
    """

    specs: tuple[GraphSpec, ...] = ()
    required: bool = False


def requested_graphs(config: ModelConfig) -> GraphOptions | None:
    """Return the graphs that a configuration requests; None if it requests none. ModelConfigError for a size below 1."""
    cuda = config.optimization.cuda
    if not cuda.graphs:
        return None
    for spec in cuda.graph_spec:
        if spec.batch_size < 0 or any(dim < 1 for shape in spec.input.values() for dim in shape.dim):
            raise ModelConfigError(
                f"model {config.name!r}: a graph_spec of optimization.cuda has batch_size {spec.batch_size} and inputs "
                f"{ {name: list(shape.dim) for name, shape in spec.input.items()} }; sizes must be at least 1, and "
                "batch_size is left out for a model without batch axis"
            )
    specs = [
        GraphSpec(
            spec.batch_size, tuple((name, tuple(shape.dim)) for name, shape in sorted(spec.input.items()))
        )
        for spec in cuda.graph_spec
    ]
    return GraphOptions(tuple(dict.fromkeys(specs)), required=True)


class CapturedShapes:
    """Captured input shapes. With `pads`, a batch is padded to the next captured shape with enough rows."""

    def __init__(self, captured: Iterable[Mapping[str, Shape]], *, pads: bool) -> None:
        self._exact: dict[tuple[Shape, ...], Mapping[str, Shape]] = {
            tuple(shapes.values()): shapes for shapes in captured
        }
        # Captured numbers of rows, ascending, by all other dimensions. Empty without padding.
        self._rows: dict[tuple[Shape, ...], list[int]] = {}
        if pads:
            for shapes in self._exact:
                self._rows.setdefault(_without_rows(shapes), []).append(shapes[0][0])
            for rows in self._rows.values():
                rows.sort()

    def captured_shape(self, shapes: Mapping[str, Shape]) -> Mapping[str, Shape] | None:
        """Return the captured shapes for a batch, or None. `shapes` must list the inputs in the same order."""
        key = tuple(shapes.values())
        if key in self._exact:
            return self._exact[key]
        if not self._rows:
            return None
        other_dims, rows = _without_rows(key), key[0][0]
        captured_rows = self._rows.get(other_dims, ())
        at = bisect_left(captured_rows, rows)
        if at == len(captured_rows) or rows == 0:
            return None
        return self._exact[tuple((captured_rows[at], *dims) for dims in other_dims)]


def _without_rows(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(shape[1:] for shape in shapes)


def shapes_to_capture(
    graphs: GraphOptions, signature: Signature, max_batch_size: int, lengths: Sequence[Mapping[str, int]]
) -> list[Mapping[str, Shape]]:
    """Return the input shapes of each graph to capture, ascending by rows.

    `lengths` holds the padded lengths by axis name: one mapping for each length, or one empty mapping. StartError
    names a request that does not fit the model, or a dimension that must be given.
    """
    sizes = powers_of_two(max_batch_size) if max_batch_size else (0,)
    if not graphs.required and graphs.specs:
        # Rows above max_batch_size are ignored here, because the flag applies to every model of the server.
        sizes = tuple(spec.rows for spec in graphs.specs if spec.rows <= max_batch_size) or (max_batch_size,)
    specs = graphs.specs if graphs.required and graphs.specs else tuple(map(GraphSpec, sizes))
    found: dict[tuple[Shape, ...], Mapping[str, Shape]] = {}
    for spec in sorted(specs, key=lambda spec: spec.rows):
        if (spec.rows == 0) != (max_batch_size == 0) or spec.rows > max_batch_size:
            raise StartError(
                f"a graph_spec has batch_size {spec.rows}; max_batch_size is {max_batch_size}: it must be "
                + (f"from 1 to {max_batch_size}" if max_batch_size else "left out")
            )
        for padded in lengths:
            shapes = _input_shapes(spec, signature, max_batch_size > 0, padded)
            found[tuple(shapes.values())] = shapes
    return list(found.values())


def _input_shapes(
    spec: GraphSpec, signature: Signature, batched: bool, padded: Mapping[str, int]
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
            shape = tuple(dim if isinstance(dim, int) else padded.get(dim, -1) for dim in dims)
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
