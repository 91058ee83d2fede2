"""Inspection of models without serving them: how they are batched, what to change, and what batches take."""
