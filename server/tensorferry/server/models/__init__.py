"""Models: registry, repository, loading, unloading."""
