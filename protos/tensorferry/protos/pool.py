"""The protobuf descriptor pool of tensorferry's own messages.

tritonclient, KServe and MLServer register package `inference` in protobuf's process-wide pool, and grpcio's packages
register the standard services there. A second registration of the same names fails. Ours are in a private pool, so that
one process can import all of them. `make protos` points the generated code here; it calls `Default()` in place of
`google.protobuf.descriptor_pool.Default()`.
"""

from google.protobuf import any_pb2, descriptor_pool, duration_pb2

POOL = descriptor_pool.DescriptorPool()

# A pool finds imported files in itself only.
for _imported in (any_pb2, duration_pb2):
    POOL.AddSerializedFile(_imported.DESCRIPTOR.serialized_pb)


def Default() -> descriptor_pool.DescriptorPool:  # noqa: N802 (the name that generated code calls)
    """Return the private pool."""
    return POOL
