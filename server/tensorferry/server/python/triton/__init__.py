"""Models of Triton's Python backend: `model.py` with a class `TritonPythonModel`."""
