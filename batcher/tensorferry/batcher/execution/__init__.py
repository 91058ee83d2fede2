"""Threads and batches: workers join, run and split batches, and complete requests."""
