"""Options that contradict each other, or have no effect without another, are errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ConfigError


def load(flags: Mapping[str, str | None], models: Sequence[str] = ("m.onnx",)) -> ServerConfig:
    return load_config(models, flags, {}, None)


TLS = {"tls-certificate": "a.crt", "tls-key": "a.key"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"allow-http": "true"}, "no model is there. Leave it out; for clients that speak HTTP give --http-port 8000"),
        ({"tls-certificate": "a.crt"}, "tls-certificate is 'a.crt', but there is no tls-key"),
        ({"tls-key": "a.key"}, "tls-key is 'a.key', but there is no tls-certificate"),
        ({"tls-client-ca": "ca.crt"}, "tls-client-ca is 'ca.crt', but the port is not TLS"),
        ({**TLS, "auth-certificates": "c"}, "auth-certificates is 'c', but clients are not asked"),
        ({"http-cors-origins": "https://a,app://b"}, "is 'https://a,app://b', but there is no HTTP port; give --http-port 8000"),
        ({"pad-values": "ids=0"}, "pad-values are given without pad-lengths; say what is padded"),
        ({"pad-lengths": "n=16", "max-batch-size": "0"}, "pad-lengths are given, but max-batch-size is 0"),
        ({"preferred-batch-sizes": "4,16", "max-batch-size": "8"}, "has 16, but max-batch-size is 8: choose sizes up to that"),
        ({"priority-weights": "8,1", "default-priority": "3"}, "default-priority is 3, but priority-weights has 2 classes: choose one of these"),
    ],
)  # fmt: skip
def test_a_contradiction_is_an_error(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "128.0.0.1"])
def test_tokens_over_a_network_need_tls(host: str) -> None:
    flags = {"auth-tokens": "tokens", "host": host}
    with pytest.raises(ConfigError, match="without TLS the network can read the tokens"):
        load(flags)
    assert load({**flags, **TLS})
    assert load({**flags, "auth-over-plaintext": "true"})


@pytest.mark.parametrize("host", ["127.1.2.3", "[::1]", "localhost"])
def test_tokens_on_loopback_need_no_tls(host: str) -> None:
    assert load({"auth-tokens": "tokens", "host": host})


def test_a_tolerance_of_fp16_without_fp16_is_an_error() -> None:
    tolerance = {"fp16-tolerance": "0.5"}
    with pytest.raises(ConfigError, match=r"fp16-tolerance is 0\.5, but no model is converted"):
        load(tolerance)
    # A model of the repository can ask for FP16 itself.
    assert load({**tolerance, "model-repository": "models"}, models=())


def test_the_default_priority_can_be_the_lowest_class() -> None:
    assert load({"priority-weights": "8,4,1", "default-priority": "3"}).default_priority == 3
