"""Pipelines: requests pass through several batchers, and each forms its own batches."""
