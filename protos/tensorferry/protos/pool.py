"""The protobuf descriptor pool of tensorferry's own messages.

tritonclient, KServe and MLServer register package `inference` in protobuf's process-wide
pool, and grpcio's packages register the standard services. A second registration of the same
names fails there. Ours live in a pool of their own, so that all of them can be imported in one
process. `make protos` points the generated code here; it calls `Default()` as it would call that
of `google.protobuf.descriptor_pool`.
"""

from google.protobuf import any_pb2, descriptor_pool, duration_pb2

POOL = descriptor_pool.DescriptorPool()

# A pool finds imported files only in itself.
for _imported in (any_pb2, duration_pb2):
    POOL.AddSerializedFile(_imported.DESCRIPTOR.serialized_pb)


def Default() -> descriptor_pool.DescriptorPool:  # noqa: N802 (the name that generated code calls)
    """The private pool that holds tensorferry's descriptors."""
    return POOL
