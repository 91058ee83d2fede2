"""Methods that would change one of several server processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import pytest

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import OneProcessError
from tensorferry.server.methods.one_process_only import OneProcessOnly
from tensorferry.server.status import status_of

_RELOAD = "send SIGHUP to the server, which replaces its processes one by one"
_ALONE = "start the server with --processes 1"
REFUSED = {
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), _RELOAD),
    **{
        f"{kind}SharedMemory{change}egister": _ALONE for kind in ("System", "Cuda") for change in ("R", "Unr")
    },
}

Methods = Mapping[str, Callable[[Any], Any]]


class Extension:
    """An extension that answers each request with itself."""

    names = ("some",)

    def methods(self) -> Methods:
        names = [*REFUSED, "LogSettings", "RepositoryIndex", "SystemSharedMemoryStatus"]
        return {name: lambda request: request for name in names}


@pytest.fixture
def methods() -> Methods:
    only = OneProcessOnly(Extension())
    assert only.names == ("some",)
    return only.methods()


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_refused_with_what_to_do_instead(methods: Methods, name: str) -> None:
    with pytest.raises(
        OneProcessError, match=f"^{name} would change one of the server's .*{REFUSED[name]}$"
    ) as refused:
        methods[name](object())
    assert status_of(refused.value).code is grpc.StatusCode.FAILED_PRECONDITION


def test_log_settings_are_read_and_not_changed(methods: Methods) -> None:
    request = pb.LogSettingsRequest()
    assert methods["LogSettings"](request) is request
    request.settings["log_info"].bool_param = False
    with pytest.raises(OneProcessError, match="give the settings as options, and send SIGHUP"):
        methods["LogSettings"](request)
