"""Creates the source for a model URI."""

from __future__ import annotations

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.sources.source import Source
from baton_engine.fetch.sources.uri import HubModel, parse


def create_source(uri: str) -> Source:
    """Create the source for a model URI. Imports only the library that the URI needs.

    Raises:
        FetchError: the URI is invalid, or the library is not installed.
    """
    model = parse(uri)
    try:
        if isinstance(model, HubModel):
            from baton_engine.fetch.sources.hub import HubSource

            return HubSource(model)
        from baton_engine.fetch.sources.object_store import ObjectStoreSource

        return ObjectStoreSource(model)
    except ImportError as error:
        text = f"{uri.partition(':')[0]}:// needs the packages of the extra baton[fetch]: {error}"
        raise FetchError("ModelSourceUnsupported", text) from error
