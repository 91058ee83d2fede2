"""Scheduling policy: pure functions that decide when a batch closes, and which requests are in it."""
