"""Model configurations (config.pbtxt): read, completed, and compared with the ONNX file."""
