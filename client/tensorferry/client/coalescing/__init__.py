"""Calls of several callers in one message: which may be joined, when a message is sent, and who gets which rows."""

from tensorferry.client.coalescing.forms import Forms
from tensorferry.client.coalescing.options import Coalesce, coalesce_of

__all__ = ["Coalesce", "Forms", "coalesce_of"]
