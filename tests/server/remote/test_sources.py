"""The packages of the extras are optional: a server that serves local files imports none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tensorferry.server.remote import stores
from tensorferry.server.remote.failures import RemoteError
from tensorferry.server.remote.sources import stores as stores_of
from tensorferry.server.remote.url import parse_file

_PROGRAM = """
import sys
import tensorferry.server.app, tensorferry.server.cli.inspect, tensorferry.server.cli.serve, tensorferry.server.cli.show_config
packages = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "huggingface_hub", "s3fs")
sys.exit(", ".join(name for name in packages if name in sys.modules))
"""


def test_no_package_of_an_extra_is_imported_unless_it_is_used() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert ended.stderr.strip() == ""


@pytest.mark.parametrize(
    ("address", "extra"), [("hf://org/repo/m.onnx", "hf"), ("s3://b/m.onnx", "s3"), ("gs://b/m.onnx", "gcs")]
)
def test_each_scheme_names_its_extra_if_the_package_is_missing(
    address: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(stores, "import_module", missing)
    url = parse_file(address)
    with pytest.raises(
        RemoteError, match=rf"is missing, which .* needs: pip install 'tensorferry\[{extra}\]'"
    ):
        stores_of(allow_http=False)(url).describe(url)
