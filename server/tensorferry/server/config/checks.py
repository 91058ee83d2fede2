"""Checks across options: values that contradict each other, or have no effect without another option."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.config.model_tables import table_name
from tensorferry.server.config.option import OptionScope
from tensorferry.server.config.server_config import OPTIONS, PYTHON_SUFFIX, ServerConfig
from tensorferry.server.errors import ConfigError


def check(config: ServerConfig) -> None:
    """Raise ConfigError for the first contradiction."""
    _check_models(config)
    _check_security(config)
    _check_http(config)
    of_models = [config.for_model(name) for name in config.model_options]
    _check_options(_Given(config, [option.field for option in OPTIONS], [config, *of_models]))
    for (name, options), of_model in zip(config.model_options.items(), of_models, strict=True):
        try:
            _check_options(_Given(of_model, options, [of_model]))
        except ConfigError as error:
            raise ConfigError(f"{table_name(name)}: {error}") from None


def changed_cuda_options(config: ServerConfig, fields: Collection[str] | None = None) -> Sequence[str]:
    """Return the changed options that have no effect without a GPU, each as in "tf32 is false".

    With `fields`, only these are considered.
    """
    return [
        f"{option.flag} is {option.parser.format(value)}"
        for option in OPTIONS
        if option.scope is OptionScope.CUDA and (fields is None or option.field in fields)
        for value in [getattr(config, option.field)]
        if value != option.default
    ]


@dataclass(frozen=True, slots=True)
class _Given:
    """Options to check: those with the names `fields`, which `config` has.

    An option has an effect if it has one in any of the configurations `users`.
    """

    config: ServerConfig
    fields: Collection[str]
    users: Sequence[ServerConfig]

    def value(self, field: str) -> Any:
        """Return the value of an option; None if it is not one of those to check."""
        return getattr(self.config, field) if field in self.fields else None


def _check_options(given: _Given) -> None:
    _check_batching(given)
    _check_clients(given)
    _check_devices(given)


def _check_models(config: ServerConfig) -> None:
    if not (config.models or config.model_repositories or config.embeddings):
        in_table = "".join(f", or path in {table_name(name)}" for name in list(config.model_options)[:1])
        raise ConfigError(
            f"no MODEL was given; name at least one: tensorferry serve path.onnx, or --model-repository DIR{in_table}"
        )
    # A Python file or a repository may name addresses, too.
    if (
        config.allow_http
        and not config.model_repositories
        and not config.embeddings
        and all(source.origin is None and source.path.suffix != PYTHON_SUFFIX for source in config.models)
    ):
        raise ConfigError(
            "allow-http is true, which lets models be fetched over http://, but no model is there. Leave it out; for clients that "
            "speak HTTP give --http-port 8000"
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


def _check_batching(given: _Given) -> None:
    config = given.config
    if config.default_priority > len(config.priority_weights):
        raise ConfigError(
            f"default-priority is {config.default_priority}, but priority-weights has {len(config.priority_weights)} "
            "classes: choose one of these"
        )
    for size in given.value("preferred_batch_sizes") or ():
        if all(size > user.max_batch_size for user in given.users):
            raise ConfigError(
                f"preferred-batch-sizes has {size}, but max-batch-size is {config.max_batch_size}: choose sizes up to that"
            )
    if given.value("pad_values") and all(user.pad_lengths is None for user in given.users):
        raise ConfigError(
            "pad-values are given without pad-lengths; say what is padded: --pad-lengths AXIS=16,32,64"
        )
    if given.value("pad_lengths") and all(user.max_batch_size == 0 for user in given.users):
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


def _check_http(config: ServerConfig) -> None:
    if config.http_cors_origins and config.http_port is None:
        raise ConfigError(
            f"http-cors-origins is {','.join(config.http_cors_origins)!r}, but there is no HTTP port; give --http-port 8000, or "
            "leave it out"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_clients(given: _Given) -> None:
    if given.value("client_weights") and not any(user.fair_share for user in given.users):
        raise ConfigError("client-weights is given, but clients do not share by weight; give --fair-share")


def _check_devices(given: _Given) -> None:
    if given.config.processes != 1 and None in (user.instances for user in given.users):
        raise ConfigError(
            "instances is auto, which measures one process with all cores, but there are several; give instances a number, or "
            "leave out processes"
        )
    if all(user.device == "cpu" for user in given.users):
        for changed in changed_cuda_options(given.config, given.fields):
            raise ConfigError(f"{changed}, which has no effect because device is cpu; leave out one of them")
    # A model of a repository can ask for FP16 itself.
    if not given.config.model_repositories and not any(user.fp16 for user in given.users):
        tolerance = given.value("fp16_tolerance")
        if tolerance not in (None, ServerConfig.fp16_tolerance):
            raise ConfigError(
                f"fp16-tolerance is {tolerance:g}, but no model is converted to FP16; give --fp16, or leave it out"
            )
