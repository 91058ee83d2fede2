"""ONNX Runtime and the machine: what sessions are made from, and what the machine has room for."""
