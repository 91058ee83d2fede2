"""Names in the protocol: the patterns of model names and versions, the names of standard services, and printable names of tensors."""

from __future__ import annotations

import re

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
# The same rule for error messages.
NAME_RULE = "a name starts with a letter or digit, continues with letters, digits, '.', '_' and '-', and has at most 128 characters"

# Of directories that have a version of a model.
VERSION = re.compile("[1-9][0-9]*")

# Not read from the descriptors, because the supervisor must not import protobuf.
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def printable(text: str) -> str:
    """Return a text without characters that control a terminal or break a line: each is an escape such as \\x1b.

    Names of tensors and nodes in a model's file can have any character.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: str) -> str:
    """Return a text of several lines, each printable. All but the first are indented.

    So a line that a name breaks off does not look like one of the program's own.
    """
    return "\n    ".join(map(printable, text.rstrip("\n").split("\n")))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
