"""The wire contract: messages, service stubs and the tensor codec."""

from tensorferry.protos import inference_pb2, inference_pb2_grpc, model_config_pb2
from tensorferry.protos.pool import POOL

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

__all__ = [
    "POOL",
    "SERVICE_NAME",
    "inference_pb2",
    "inference_pb2_grpc",
    "model_config_pb2",
]
