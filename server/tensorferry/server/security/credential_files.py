"""Files with the credentials of clients: each line has a name, its roles, and a token hash or certificate name.

    # NAME  ROLES          what proves it
    alice   infer          sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    deploy  infer,control  sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11b752

A name may have several lines, so that its token can be replaced without interruption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tensorferry.server.identity import ROLES, ClientIdentity
from tensorferry.server.names import NAME

TOKEN = "sha256:"
SAN, COMMON_NAME = "san:", "cn:"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 16 << 20


class CredentialFileError(Exception):
    """The file cannot be used. The message names file, line and fault, and quotes nothing that may be secret."""


def read_tokens(path: Path) -> Mapping[str, ClientIdentity]:
    """Return clients by the SHA-256 of their tokens, in hexadecimal."""
    return _read_credentials(
        path, (TOKEN,), "sha256: and 64 hexadecimal digits, as tensorferry token prints them"
    )


def read_certificates(path: Path) -> Mapping[str, ClientIdentity]:
    """Return clients by certificate name: `san:` and a subject alternative name, or `cn:` and a common name."""
    return _read_credentials(path, (SAN, COMMON_NAME), "san: or cn:, and the name that the certificate has")


def parse_roles(text: str) -> frozenset[str]:
    """Parse roles separated by commas. ValueError if one is unknown."""
    roles = frozenset(text.split(","))
    if not roles <= ROLES:
        raise ValueError
    return roles


def _read_credentials(path: Path, kinds: tuple[str, ...], expected: str) -> Mapping[str, ClientIdentity]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise CredentialFileError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CredentialFileError(f"{path} is not text in UTF-8") from None
    if len(data) > _MAX_BYTES:
        raise CredentialFileError(f"{path} has more than {_MAX_BYTES} bytes")
    clients: dict[str, ClientIdentity] = {}
    for number, line in enumerate(text.splitlines(), 1):
        # Only whole lines are comments, because a certificate name may contain #.
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path}, line {number}"
        fields = line.split(maxsplit=2)
        if len(fields) < 3:
            raise CredentialFileError(
                f"{where} has {len(fields)} of the three fields NAME ROLES and {expected}"
            )
        name, roles, proof = fields[0], fields[1], fields[2].strip()
        # The field is not quoted: if the fields are in the wrong order, it may be a secret.
        if not NAME.fullmatch(name):
            raise CredentialFileError(
                f"{where} does not begin with a name: a letter or digit, then these and '.', '_', '-', at most 128"
            )
        try:
            allowed = parse_roles(roles)
        except ValueError:
            raise CredentialFileError(
                f"{where} has unknown roles for {name}; the roles are {' and '.join(sorted(ROLES))}, separated by commas"
            ) from None
        kind = next((kind for kind in kinds if proof.startswith(kind)), None)
        if kind == TOKEN:
            proof = proof.removeprefix(TOKEN).lower()
        if kind is None or (kind == TOKEN and not _DIGEST.fullmatch(proof)) or proof == kind:
            raise CredentialFileError(f"{where}: the third field for {name} must be {expected}")
        if proof in clients:
            raise CredentialFileError(f"{where} repeats for {name} the credential of {clients[proof].name}")
        clients[proof] = ClientIdentity(name, allowed)
    return clients
