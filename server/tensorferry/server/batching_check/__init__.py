"""Whether requests may share a batch: what running a model shows, and what follows together with its graph."""
