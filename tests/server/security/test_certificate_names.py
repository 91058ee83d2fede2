"""Detection of NUL characters in certificate names."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from support.server.certificates import authority, issue
from support.server.rig import reproducible

from tensorferry.server.security.certificate_names import has_nul_in_name

SIGNER = authority()


@pytest.mark.parametrize(
    ("name", "alternative"),
    [
        ("Zo\u00eb \u4e2d \U0001f600", ()),
        ("client", (x509.DNSName("client.example"), x509.IPAddress(ipaddress.ip_address("0.0.0.0")))),
        ("client", (x509.RFC822Name("a@b.example"), x509.UniformResourceIdentifier("spiffe://a/b"))),
        ("client", [x509.DNSName(f"{number}.example") for number in range(500)]),
    ],
)
def test_names_without_a_nul(name: str, alternative: Sequence[x509.GeneralName]) -> None:
    assert not has_nul_in_name(issue(SIGNER, name, alternative).pem)


@pytest.mark.parametrize(
    ("name", "alternative"),
    [
        ("client\0.evil.org", ()),
        ("client", (x509.DNSName("client.example"), x509.DNSName("client.example\0.evil.org"))),
        ("client", (x509.UniformResourceIdentifier("spiffe://a\0/b"),)),
        ("client", (x509.RFC822Name("a\0@b.example"),)),
    ],
)
def test_names_with_a_nul(name: str, alternative: Sequence[x509.GeneralName]) -> None:
    assert has_nul_in_name(issue(SIGNER, name, alternative).pem)


@reproducible
@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_certificate_raises_nothing(at: int, other: bytes) -> None:
    pem = SIGNER.pem
    assert has_nul_in_name(pem[:at] + other + pem[at + len(other) :]) in (True, False)


@pytest.mark.parametrize("pem", [SIGNER.pem[:100], SIGNER.key_pem], ids=["cut", "key"])
def test_other_content_is_refused(pem: bytes) -> None:
    assert has_nul_in_name(pem)
