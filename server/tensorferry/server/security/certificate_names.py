"""Detection of NUL characters in the names of a client's certificate.

grpcio truncates a name at its first NUL: `client.example\\0.evil.org`, which an authority may sign for the owner of
`evil.org`, becomes `client.example`. So the server parses the certificate itself.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import lru_cache

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"

# DER tags, and the object identifiers 2.5.4.3 (common name) and 2.5.29.17 (alternative names).
_SEQUENCE, _OCTETS, _IDENTIFIER = 0x30, 0x04, 0x06
_VERSION, _EXTENSIONS = 0xA0, 0xA3
_COMMON_NAME, _ALTERNATIVE_NAMES = bytes.fromhex("550403"), bytes.fromhex("551d11")
# Tags of mail addresses, DNS names and URIs. IP addresses are not text.
_TEXT_NAMES = (0x81, 0x82, 0x86)
# Encodings with two or four bytes per character.
_WIDE = {0x1E: "utf-16-be", 0x1C: "utf-32-be"}

_Element = tuple[int, bytes]


@lru_cache(maxsize=256)
def has_nul_in_name(pem: bytes) -> bool:
    """Return whether a name in a certificate has a NUL, or the certificate cannot be parsed."""
    try:
        encoded = pem[pem.index(_BEGIN) + len(_BEGIN) : pem.index(_END)]
        return any("\0" in name for name in _certificate_names(base64.b64decode(encoded)))
    except (ValueError, IndexError):
        return True


def _certificate_names(certificate: bytes) -> Iterator[str]:
    (outer,) = _elements(certificate)
    first, *_ = _elements(outer[1])
    signed = list(_elements(_content_with_tag(first, _SEQUENCE)))
    # The fields are version (optional), serial number, algorithm, issuer, validity, subject.
    subject = signed[5 if signed[0][0] == _VERSION else 4]
    for _, attributes in _elements(_content_with_tag(subject, _SEQUENCE)):
        for _, attribute in _elements(attributes):
            identifier, value = _elements(attribute)
            if _content_with_tag(identifier, _IDENTIFIER) == _COMMON_NAME:
                yield _decode_name(*value)
    for tag, content in signed:
        if tag == _EXTENSIONS:
            (extensions,) = _elements(content)
            for _, extension in _elements(extensions[1]):
                identifier, *_, value = _elements(extension)
                if identifier[1] == _ALTERNATIVE_NAMES:
                    yield from _alternative_names(_content_with_tag(value, _OCTETS))


def _alternative_names(extension: bytes) -> Iterator[str]:
    (names,) = _elements(extension)
    for tag, content in _elements(names[1]):
        if tag in _TEXT_NAMES:
            yield _decode_name(tag, content)


def _decode_name(tag: int, content: bytes) -> str:
    return content.decode(_WIDE.get(tag, "latin-1"))


def _content_with_tag(element: _Element, tag: int) -> bytes:
    if element[0] != tag:
        raise ValueError(f"DER element with tag {element[0]:#x}, expected {tag:#x}")
    return element[1]


def _elements(data: bytes) -> Iterator[_Element]:
    """Yield tag and content of each DER element."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size > 127:
            count = size & 127
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + size > len(data):
            raise ValueError("DER element is truncated")
        yield tag, data[at : at + size]
        at += size
