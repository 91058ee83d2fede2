"""Model files before ONNX Runtime loads them: facts, operators, conversions and remedies."""
