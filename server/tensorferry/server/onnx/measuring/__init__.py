"""Measuring of an ONNX model: times and memory of batches, and divisions of the cores into sessions."""
