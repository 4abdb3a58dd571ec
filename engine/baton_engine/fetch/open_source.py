"""Chooses the source that a URI names."""

from __future__ import annotations

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.source import Source
from baton_engine.fetch.uri import HubModel, parse


def open_source(uri: str) -> Source:
    """Imports only the library that the URI needs. Raises FetchError."""
    model = parse(uri)
    try:
        if isinstance(model, HubModel):
            from baton_engine.fetch.hub import HubSource

            return HubSource(model)
        from baton_engine.fetch.object_store import ObjectStoreSource

        return ObjectStoreSource(model)
    except ImportError as error:
        text = f"this image does not hold what {uri.partition(':')[0]}:// needs (pip install baton[fetch]): {error}"
        raise FetchError("ModelSourceUnsupported", text) from error
