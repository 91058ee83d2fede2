"""Models of the option --embeddings: encoders of texts in a directory or a repository, with their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.remote.url import is_remote, parse_url
from tensorferry.server.names import NAME, NAME_RULE
from tensorferry.serving import DeclarationError, embeddings, onnx, tokenizer

_TOKENIZER = "tokenizer.json"
# Where an encoder is, the first choice first. Exporters write the first, repositories of Hugging Face have the second.
# A directory with one ONNX file may name it otherwise.
_ENCODERS = ("model.onnx", "onnx/model.onnx")


def embedding_sources(given: Sequence[str]) -> Sequence[ModelSource]:
    """Return the models of --embeddings: of each the ONNX file, its tokenizer, and its pooling. StartError."""
    return [_source(text) for text in given]


def _source(text: str) -> ModelSource:
    name, equals, place = text.partition("=")
    if not equals or "/" in name:
        name, place = "", text
    encoder, tokens, own_name, served_as = _remote(place) if is_remote(place) else _local(Path(place))
    name = name or own_name
    if not NAME.fullmatch(name):
        raise StartError(
            f"--embeddings is {text!r}, and the name {name!r} is not allowed: {NAME_RULE}; choose one by NAME=..."
        )
    try:
        declared = embeddings(name, tokenizer(tokens), onnx(encoder), served_as=served_as)
    except DeclarationError as error:
        raise StartError(f"--embeddings is {text!r}: {error}") from None
    return ModelSource(name, Path(encoder), declaration=declared)


def _remote(address: str) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the addresses of encoder and tokenizer, the model's name, and the name that clients may know it by."""
    try:
        url = parse_url(address)
    except ConfigError as error:
        raise StartError(f"--embeddings: {error}") from None
    encoder_given = url.path.endswith(".onnx")
    if url.scheme != "hf" or url.pins or (url.path and not encoder_given):
        raise StartError(
            f"--embeddings is {url}; it must be hf://ORG/REPO, hf://ORG/REPO/onnx/model.onnx or a directory. Other addresses and "
            "hashes of files are for a Python file with embeddings()"
        )
    # Of the address, because a revision can be encoded in it.
    repository = address.removesuffix(url.path).rstrip("/")
    encoder = address if encoder_given else f"{repository}/{_ENCODERS[-1]}"
    return encoder, f"{repository}/{_TOKENIZER}", url.container.rpartition("/")[2], (url.container,)


def _local(place: Path) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the paths of encoder and tokenizer, and the model's name."""
    place = place.absolute()
    if place.suffix == ".onnx":
        encoder, folders = place, (place.parent, place.parent.parent)
    else:
        found = [file for name in _ENCODERS if isfile(file := place / name)]
        others = sorted(place.glob("*.onnx"))
        if not found and len(others) != 1:
            has = f" but {', '.join(file.name for file in others)}" if others else ""
            raise StartError(
                f"--embeddings: {place} has no {' or '.join(_ENCODERS)}{has}; give the path of the ONNX file"
            )
        encoder, folders = (found or others)[0], (place, place)
    tokens = next((file for folder in folders if isfile(file := folder / _TOKENIZER)), None)
    if tokens is None:
        raise StartError(
            f"--embeddings: there is no {folders[0] / _TOKENIZER}, which the encoder {encoder} needs"
        )
    return str(encoder), str(tokens), tokens.parent.name, ()
