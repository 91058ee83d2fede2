"""Exceptions of the tensor codec, for modules that need no numpy."""

from __future__ import annotations


class TensorError(ValueError):
    """A tensor does not match its datatype, its shape or its encoding."""
