"""Steps of models: what runs a batch, an ONNX model or a Python function, without a batcher; and stages of several steps."""
