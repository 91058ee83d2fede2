"""The stores of all schemes, and what the operator allows of them."""

from __future__ import annotations

from collections.abc import Callable

from tensorferry.server.remote.failures import RemoteError
from tensorferry.server.remote.fetching import StoreOf
from tensorferry.server.remote.https import HttpsStore
from tensorferry.server.remote.hub import HubStore
from tensorferry.server.remote.object_storage import ObjectStore, open_gcs, open_s3
from tensorferry.server.remote.stores import Store
from tensorferry.server.remote.url import RemoteUrl

_STORES: dict[str, Callable[[], Store]] = {
    "hf": HubStore,
    "s3": lambda: ObjectStore(open_s3),
    "gs": lambda: ObjectStore(open_gcs),
    "https": HttpsStore,
    "http": HttpsStore,
}


def stores(*, allow_http: bool) -> StoreOf:
    """Return a function that returns the store of an address, made once for each scheme.

    The function raises RemoteError for http:// unless that is allowed. Only for one thread at a time.
    """
    made: dict[str, Store] = {}

    def store_of(url: RemoteUrl) -> Store:
        if url.scheme == "http" and not allow_http:
            raise RemoteError(
                f"{url} is not encrypted, so the network can read and replace the model; give https://, or --allow-http if the "
                "network is trusted"
            )
        if url.scheme not in made:
            made[url.scheme] = _STORES[url.scheme]()
        return made[url.scheme]

    return store_of
