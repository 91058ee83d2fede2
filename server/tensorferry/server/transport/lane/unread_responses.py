"""Accounts of unread responses, for calls of the lane."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensorferry.server.errors import ServerError, UnreadResponsesError
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.status import status_of
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.unread_responses import ResponseAccount, UnreadResponses

_BUILT = ServerError("the message was built")


def account_of(call: Any) -> ResponseAccount:
    """Return an account for the responses of one of core's calls."""
    return ResponseAccount(cygrpc.peer_of(call), partial(_give_up, call))


def count_response(unread: UnreadResponses, call: Any, reply: InferenceReply, nbytes: int) -> ResponseAccount:
    """Count the only response of a call, whose message was built; UnreadResponsesError if it must not be kept."""
    account = account_of(call)
    error = unread.add(account, nbytes)
    if error is not None:
        raise error
    # The message is a copy, and without this the tensors would be kept until the client has read it.
    reply.replace_with_error(_BUILT)
    return account


def _give_up(call: Any, error: UnreadResponsesError) -> None:
    cygrpc.end(call, status_of(error))
