"""Checks of a model at load, by running it in a child process or on random inputs."""
