"""gRPC in, ONNX Runtime out."""
