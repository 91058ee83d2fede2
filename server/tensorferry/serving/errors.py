"""Errors of declarations, and the one that a function raises for its client."""

from __future__ import annotations


class InvalidInput(Exception):
    """The client's input is not valid. Raise it in a model's function: the client gets INVALID_ARGUMENT with this text.

    The text of every other exception stays in the server's log.

        >>> raise InvalidInput("the image is not a JPEG file")
        Traceback (most recent call last):
            ...
        tensorferry.serving.errors.InvalidInput: the image is not a JPEG file
    """


class DeclarationError(ValueError):
    """A model, step or pipeline is declared wrongly. The message names it, and says what to change."""
