"""The protobuf descriptor pool of tensorferry's own messages.

tritonclient, KServe and MLServer register package `inference` in protobuf's process-wide
pool, where a second registration of the same names fails. Ours live in a pool of their own,
so that all of them can be imported in one process. `make protos` points the generated code
here; it calls `Default()` as it would call that of `google.protobuf.descriptor_pool`.
"""

from google.protobuf import descriptor_pool

POOL = descriptor_pool.DescriptorPool()


def Default() -> descriptor_pool.DescriptorPool:  # noqa: N802 (the name that generated code calls)
    """The private pool that holds tensorferry's descriptors."""
    return POOL
