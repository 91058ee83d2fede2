"""Models from their load to their end: registry, loading, stages, unloading."""
