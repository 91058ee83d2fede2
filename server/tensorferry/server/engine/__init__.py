"""The engine: models, batchers and sessions, for the requests of all front-ends."""
