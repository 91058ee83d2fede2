"""Damaged certificates and other content count as names with a NUL character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.certificates import authority
from support.server.rig import reproducible

from tensorferry.server.security.certificate_names import has_nul_in_name

SIGNER = authority()


@reproducible
@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_certificate_raises_nothing(at: int, other: bytes) -> None:
    pem = SIGNER.pem
    assert has_nul_in_name(pem[:at] + other + pem[at + len(other) :]) in (True, False)


NOTHING_SIGNED = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"


@pytest.mark.parametrize(
    "pem", [SIGNER.pem[:100], SIGNER.key_pem, NOTHING_SIGNED], ids=["cut", "key", "empty sequence"]
)
def test_other_content_is_refused(pem: bytes) -> None:
    assert has_nul_in_name(pem)
