"""Execution of batches on worker threads: join, run, split, complete; failures and recovery."""
