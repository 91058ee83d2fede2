"""Loading of ONNX models: preparation, padding and sessions."""
