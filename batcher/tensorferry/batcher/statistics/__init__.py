"""Counters, histograms and the most recent batches."""
