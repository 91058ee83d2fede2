"""The whole server in one process: listen, load, serve, drain and stop."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.models import small
from support.server.rig import PATIENCE, Make, fp32, request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.protos.standard import reflection_pb2 as standard
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.names import REFLECTION_SERVICES
from tensorferry.server.system.addresses import address_of
from tensorferry.server.transport.lane import batched_sends
from tensorferry.server.transport.lane.tcp_cork import TcpCork


def connect(app: App) -> grpc.Channel:
    return grpc.insecure_channel(app.address)


def health(channel: grpc.Channel, service: str = "") -> int:
    status: int = (
        health_pb2_grpc.HealthStub(channel)
        .Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        .status
    )
    return status


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_life_of_a_server_from_start_to_stop(make: Make, transport: str) -> None:
    app = make()
    app.start()
    assert app.transport == transport
    assert app.port > 0
    with connect(app) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE).live
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE).ready
        assert [health(channel), health(channel, "m")] == [NOT_SERVING, NOT_SERVING]
        app.load()
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE).ready
        names = ["", "m", "inference.GRPCInferenceService"]
        assert [health(channel, name) for name in names] == [SERVING] * 3
        response = stub.ModelInfer(request({"x": fp32(2, 3)}), timeout=PATIENCE)
        assert response.raw_output_contents[0] == (fp32(2, 3) * 2).tobytes()
        assert app.drain()
        assert [health(channel, name) for name in names] == [NOT_SERVING] * 3
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE).ready
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request({"x": fp32(2, 3)}), timeout=PATIENCE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert app.stop()
    assert app.stop()


def test_only_a_model_that_serves_needs_a_restart_if_its_device_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "m" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    small.twice(path)
    config = ServerConfig(
        (),
        model_repositories=(tmp_path,),
        port=0,
        device="cpu",
        model_control="explicit",
        load_models=("m",),
    )
    lost: list[str] = []
    app = App(config, on_device_loss=lost.append)
    app.start()
    app.load()
    replaced = app.registry.get("m")
    small.centred(path)
    with connect(app) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=PATIENCE)
    for model in (replaced, app.registry.get("m")):
        assert lost == []
        model.health.mark_down(0, "the device hangs", unrecoverable=True)
    assert lost == ["the device hangs"]
    assert app.stop()


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7")]
)
def test_the_address_of_an_ipv6_host_has_brackets(host: str, address: str) -> None:
    assert address_of(host, 7) == address


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
def test_both_versions_of_reflection_answer_every_kind_of_request(make: Make, service: str) -> None:
    app = make()
    app.start()
    request = standard.ServerReflectionRequest
    extension = standard.ExtensionRequest(
        containing_type="inference.ModelInferRequest", extension_number=1000
    )
    requests = [
        request(file_by_filename="tensorferry/protos/inference.proto"),
        request(file_by_filename="other.proto"),
        request(file_containing_symbol="other.Name"),
        request(file_containing_extension=extension),
        request(all_extension_numbers_of_type="inference.ModelInferRequest"),
        request(all_extension_numbers_of_type="other.Name"),
        request(),
        request(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
    ]
    with connect(app) as channel:
        ask = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=request.SerializeToString,
            response_deserializer=standard.ServerReflectionResponse.FromString,
        )
        answers = list(ask(iter(requests), timeout=PATIENCE))
    assert [answer.original_request for answer in answers] == requests
    assert [len(answers[at].file_descriptor_response.file_descriptor_proto) for at in (0, 7)] == [2, 2]
    assert answers[4].all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    codes = [answers[number].error_response.error_code for number in (1, 2, 3, 5, 6)]
    not_found, invalid = (
        code.value[0] for code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    )
    assert codes == [not_found] * 4 + [invalid]
    assert "file_containing_symbol" in answers[6].error_response.error_message


def test_the_responses_of_one_batch_to_one_connection_are_sent_together(
    make: Make, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corked: list[tuple[int, int]] = []
    begin = TcpCork.begin

    def recording(self: TcpCork, count: int) -> None:
        begin(self, count)
        corked.append((count, len(self.corked)))

    monkeypatch.setattr(TcpCork, "begin", recording)
    monkeypatch.setattr(batched_sends, "_HANDOVER_SECONDS", PATIENCE)
    # A batch starts when it is full, so all eight requests are in one.
    app = make(max_batch_size=8, max_queue_delay=PATIENCE)
    app.start()
    app.load()
    with connect(app) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(request({"x": fp32(1, 3) + n}), timeout=PATIENCE) for n in range(8)]
        for n, call in enumerate(calls):
            assert call.result().raw_output_contents[0] == ((fp32(1, 3) + n) * 2).tobytes()
    # One response is sent at once, the others by the polling thread, on one connection. The threaded servicer sends each
    # response by itself.
    connections = 1 if hasattr(socket, "TCP_CORK") else 0
    assert corked == ([(7, connections)] if transport == "lane" else [])
