"""Counters, histograms and the record of recent batches."""
