"""ONNX files: analysis, checks of batching, probes, loading and inspection."""
