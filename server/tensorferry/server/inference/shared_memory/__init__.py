"""Shared memory regions, of the system and of CUDA devices."""
