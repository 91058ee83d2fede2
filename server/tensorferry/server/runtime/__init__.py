"""ONNX Runtime: sessions, options, providers, devices."""
