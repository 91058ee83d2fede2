"""Python functions and files as models, and steps in front of and behind models."""
