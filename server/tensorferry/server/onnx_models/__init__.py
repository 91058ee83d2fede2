"""Loading of ONNX models: preparation, sessions, padding and warm-up."""
