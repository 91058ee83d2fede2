"""Checks across options: values that contradict each other, or have no effect without another option."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from tensorferry.server.config.option import Option, OptionScope
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError


def check(config: ServerConfig) -> None:
    """Raise ConfigError for the first contradiction."""
    _check_models(config)
    _check_batching(config)
    _check_security(config)
    _check_clients(config)
    _check_devices(config)


def changed_cuda_options(config: ServerConfig) -> Sequence[str]:
    """Return the changed options that have no effect without a GPU, each as in "tf32 is false"."""
    return list(_changed(config, [option for option in OPTIONS if option.scope is OptionScope.CUDA]))


def _changed(config: ServerConfig, options: Sequence[Option]) -> Iterator[str]:
    for option in options:
        value = getattr(config, option.field)
        if value != option.default:
            yield f"{option.flag} is {option.parser.format(value)}"


def _check_models(config: ServerConfig) -> None:
    if not config.models and not config.model_repositories:
        raise ConfigError(
            "no MODEL was given; name at least one: tensorferry serve path.onnx, or --model-repository DIR"
        )
    names = [source.name for source in config.models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are named {name!r}; rename one of them by name=path.onnx")
    if config.model_control != "none" and not config.model_repositories:
        raise ConfigError(
            f"model-control is {config.model_control!r}, but there is no model repository; name one by --model-repository"
        )
    if config.load_models and config.model_control != "explicit":
        raise ConfigError(
            f"load-model is {','.join(config.load_models)!r}, but model-control is {config.model_control!r}, which loads "
            "every model of the repository; leave out load-model, or give --model-control explicit"
        )


def _check_batching(config: ServerConfig) -> None:
    if config.default_priority > len(config.priority_weights):
        raise ConfigError(
            f"default-priority is {config.default_priority}, but priority-weights has {len(config.priority_weights)} "
            "classes: choose one of these"
        )
    for size in config.preferred_batch_sizes:
        if size > config.max_batch_size:
            raise ConfigError(
                f"preferred-batch-sizes has {size}, but max-batch-size is {config.max_batch_size}: choose sizes up to that"
            )
    if config.pad_lengths is None and config.pad_values:
        raise ConfigError(
            "pad-values are given without pad-lengths; say what is padded: --pad-lengths AXIS=16,32,64"
        )
    if config.pad_lengths is not None and config.max_batch_size == 0:
        raise ConfigError(
            "pad-lengths are given, but max-batch-size is 0, so requests never share a batch; leave out one of them"
        )


def _check_security(config: ServerConfig) -> None:
    if (config.tls_certificate is None) != (config.tls_key is None):
        given, missing = (
            ("tls-certificate", "tls-key") if config.tls_key is None else ("tls-key", "tls-certificate")
        )
        raise ConfigError(
            f"{given} is {str(config.tls_certificate or config.tls_key)!r}, but there is no {missing}: give both or neither"
        )
    if config.tls_client_ca is not None and config.tls_certificate is None:
        raise ConfigError(
            f"tls-client-ca is {str(config.tls_client_ca)!r}, but the port is not TLS; give --tls-certificate and --tls-key"
        )
    if config.auth_certificates is not None and config.tls_client_ca is None:
        raise ConfigError(
            f"auth-certificates is {str(config.auth_certificates)!r}, but clients are not asked for certificates; give "
            "--tls-client-ca FILE"
        )
    plaintext = config.auth_tokens is not None and config.tls_certificate is None
    if plaintext and not config.auth_over_plaintext and not _is_loopback(config.host):
        raise ConfigError(
            f"auth-tokens is {str(config.auth_tokens)!r} and host is {config.host!r}, but without TLS the network can read "
            "the tokens; give --tls-certificate and --tls-key, or --auth-over-plaintext behind a proxy that terminates TLS"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_clients(config: ServerConfig) -> None:
    if config.client_weights and not config.fair_share:
        raise ConfigError("client-weights is given, but clients do not share by weight; give --fair-share")
    if config.client_burst and not config.client_rate:
        raise ConfigError(
            f"client-burst is {config.client_burst}, but clients may send at any rate; give --client-rate"
        )


def _check_devices(config: ServerConfig) -> None:
    if config.device == "cpu":
        for changed in changed_cuda_options(config):
            raise ConfigError(f"{changed}, which has no effect because device is cpu; leave out one of them")
    # A model of a repository can ask for FP16 itself.
    if not config.fp16 and not config.model_repositories:
        only_fp16 = [option for option in OPTIONS if option.field in ("fp16_tolerance", "fp16_except")]
        for changed in _changed(config, only_fp16):
            raise ConfigError(f"{changed}, but no model is converted to FP16; give --fp16, or leave it out")
