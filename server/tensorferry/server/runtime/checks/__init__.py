"""Runs that the load of a model makes: limits of time, random inputs, and what was found."""
