"""Messages of the standard services equal those of grpcio's packages."""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.rpc import error_details_pb2
from google.rpc import status_pb2 as google_status
from grpc_health.v1 import health_pb2 as grpc_health
from grpc_reflection.v1alpha import reflection_pb2 as grpc_reflection
from protos.test_descriptors import described

from tensorferry.protos import POOL
from tensorferry.protos.standard import health_pb2, reflection_pb2, reflection_v1alpha_pb2, status_pb2


def test_health_is_that_of_grpcio() -> None:
    ours, theirs = described(health_pb2.DESCRIPTOR), described(grpc_health.DESCRIPTOR)
    # Older versions have no method List.
    assert all("List" in "".join(key) for key in ours.keys() - theirs.keys())
    assert {key: ours[key] for key in theirs} == theirs


def test_reflection_is_that_of_grpcio_in_both_versions() -> None:
    assert described(reflection_v1alpha_pb2.DESCRIPTOR) == described(grpc_reflection.DESCRIPTOR)
    renamed = repr(described(reflection_pb2.DESCRIPTOR)).replace("reflection.v1.", "reflection.v1alpha.")
    assert renamed == repr(described(reflection_v1alpha_pb2.DESCRIPTOR))


def test_the_error_details_equal_googles() -> None:
    theirs = described(google_status.DESCRIPTOR) | described(error_details_pb2.DESCRIPTOR)
    for key, fact in described(status_pb2.DESCRIPTOR).items():
        assert theirs[key] == fact, key


def test_ours_stay_out_of_the_process_wide_pool() -> None:
    for name in ("grpc.health.v1.Health", "google.rpc.Status"):
        ours, theirs = (pool.FindFileContainingSymbol(name) for pool in (POOL, descriptor_pool.Default()))
        assert ours.serialized_pb != theirs.serialized_pb
