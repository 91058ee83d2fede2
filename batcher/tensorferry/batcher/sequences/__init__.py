"""Sequences of requests that hand on state: a table of those that live, and the batcher that serves them."""
