"""Names in a client's certificate that hold a NUL.

grpcio hands a name on up to its first NUL: `client.example\\0.evil.org`, which an authority may sign for the owner of
`evil.org`, becomes `client.example`. So the certificate itself is looked at.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import lru_cache

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"

# DER's tags, and the object identifiers 2.5.4.3 and 2.5.29.17.
_SEQUENCE, _OCTETS, _IDENTIFIER = 0x30, 0x04, 0x06
_VERSION, _EXTENSIONS = 0xA0, 0xA3
_COMMON_NAME, _ALTERNATIVE_NAMES = bytes.fromhex("550403"), bytes.fromhex("551d11")
# Mail addresses, DNS names and URIs among alternative names. An IP address has no text.
_TEXT_NAMES = (0x81, 0x82, 0x86)
# Texts whose characters have two or four bytes.
_WIDE = {0x1E: "utf-16-be", 0x1C: "utf-32-be"}

_Element = tuple[int, bytes]


@lru_cache(maxsize=256)
def has_nul_in_name(pem: bytes) -> bool:
    """Whether the common name or an alternative name of a certificate has a NUL, or the certificate cannot be read."""
    try:
        encoded = pem[pem.index(_BEGIN) + len(_BEGIN) : pem.index(_END)]
        return any("\0" in name for name in _names(base64.b64decode(encoded)))
    except (ValueError, IndexError, StopIteration):
        return True


def _names(certificate: bytes) -> Iterator[str]:
    (whole,) = _elements(certificate)
    signed = list(_elements(_content(next(_elements(whole[1])), _SEQUENCE)))
    # Version (which may be missing), serial number, algorithm, issuer, validity, subject.
    subject = signed[5 if signed[0][0] == _VERSION else 4]
    for _, attributes in _elements(_content(subject, _SEQUENCE)):
        for _, attribute in _elements(attributes):
            identifier, value = _elements(attribute)
            if _content(identifier, _IDENTIFIER) == _COMMON_NAME:
                yield _text(*value)
    for tag, content in signed:
        if tag == _EXTENSIONS:
            (extensions,) = _elements(content)
            for _, extension in _elements(extensions[1]):
                identifier, *_, value = _elements(extension)
                if identifier[1] == _ALTERNATIVE_NAMES:
                    yield from _alternative_names(_content(value, _OCTETS))


def _alternative_names(extension: bytes) -> Iterator[str]:
    (names,) = _elements(extension)
    for tag, content in _elements(names[1]):
        if tag in _TEXT_NAMES:
            yield _text(tag, content)


def _text(tag: int, content: bytes) -> str:
    return content.decode(_WIDE.get(tag, "latin-1"))


def _content(element: _Element, tag: int) -> bytes:
    if element[0] != tag:
        raise ValueError(f"an element with the tag {element[0]:#x} where {tag:#x} belongs")
    return element[1]


def _elements(data: bytes) -> Iterator[_Element]:
    """Tag and content of each element of DER in the data."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size > 127:
            count = size & 127
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + size > len(data):
            raise ValueError("an element goes on beyond its end")
        yield tag, data[at : at + size]
        at += size
