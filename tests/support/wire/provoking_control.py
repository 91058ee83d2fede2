"""Models and settings that clients ask for and do not get, or not yet."""

from __future__ import annotations

from typing import Any

from polling import until
from support.wire.provoking import Provoked, Served
from support.wire.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb

PROVOKED = Provoked()
when = PROVOKED.when


def to_model(name: str, version: str = "") -> pb.ModelInferRequest:
    """Send a request to a model of the repository."""
    request = pb.ModelInferRequest(model_name=name, model_version=version, raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request


def load(served: Served, name: str) -> Any:
    return served.control.RepositoryModelLoad(
        pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE
    )


def state_of(served: Served, name: str) -> Any:
    index = served.control.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE)
    (state,) = (model.state for model in index.models if model.name == name)
    return state


def while_loading(case: str, version: str) -> None:
    @when(case)
    def _(served: Served) -> Any:
        name = "loads"
        loading = served.control.RepositoryModelLoad.future(
            pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE
        )
        try:
            # Opened once the server reads it; the labels end when it is closed.
            with (served.repository / "loads" / "labels.txt").open("w"):
                return served.control.ModelInfer(to_model("loads", version), timeout=PATIENCE)
        finally:
            loading.result()
            served.control.RepositoryModelUnload(
                pb.RepositoryModelUnloadRequest(model_name=name), timeout=PATIENCE
            )
            # The answer comes before the end of the model.
            until(lambda: state_of(served, name) == "UNAVAILABLE")


while_loading("the model is loading", "1")
while_loading("the model is loading, and no version is named", "")


def infer(served: Served, name: str) -> Any:
    return served.control.ModelInfer(to_model(name), timeout=PATIENCE)


when("the model is decoupled")(lambda served: infer(served, "decoupled"))
when("the model takes sequences")(lambda served: infer(served, "sequences"))
when("a decoupled model is loaded")(lambda served: load(served, "decoupled"))
when("a model that takes sequences is loaded")(lambda served: load(served, "sequences"))
when("a broken model is loaded")(lambda served: load(served, "broken"))
when("a model is loaded that is not in the repository")(lambda served: load(served, "nothing"))


@when("a model is loaded without explicit model control")
def _(served: Served) -> Any:
    return served.stub.RepositoryModelLoad(
        pb.RepositoryModelLoadRequest(model_name="probe"), timeout=PATIENCE
    )


@when("log settings are changed")
def _(served: Served) -> Any:
    request = pb.LogSettingsRequest()
    request.settings["log_info"].bool_param = False
    return served.stub.LogSettings(request, timeout=PATIENCE)


@when("a client switches traces on")
def _(served: Served) -> Any:
    request = pb.TraceSettingRequest()
    request.settings["trace_level"].value.append("TIMESTAMPS")
    return served.stub.TraceSetting(request, timeout=PATIENCE)
