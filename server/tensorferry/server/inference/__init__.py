"""Inference requests: from the bytes of a request to the bytes of its response, without gRPC."""
