"""The batching check: may requests share a batch?"""
