"""Discovery from a file: changes are read, and an invalid file keeps the last engines."""

from __future__ import annotations

import asyncio

import pytest

from baton_gateway.routing import file_discovery
from baton_gateway.routing.file_discovery import FileDiscovery, parse_endpoints


async def test_an_invalid_discovery_file_keeps_the_last_engines(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(file_discovery, "FILE_POLL_S", 0.01)
    path = tmp_path / "engines.json"
    sets = FileDiscovery(path).watch()
    first = asyncio.create_task(anext(sets))
    path.write_text('{"engines": [{"name": "a", "role": "decode", "host": "127.0.0.9"}]}')
    [endpoint] = await asyncio.wait_for(first, 60)
    assert (endpoint.name, endpoint.engine_port, endpoint.kv_port) == ("a", 5557, 5558)
    second = asyncio.create_task(anext(sets))
    for broken in ('{"engines": [', '{"engines": [{"name": "a"}]}'):
        path.write_text(broken)
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done
    path.write_text('{"engines": []}')
    assert await asyncio.wait_for(second, 60) == []
    await sets.aclose()


def test_invalid_discovery_files_are_refused() -> None:
    for content in (
        b'{"engines": [{"name": "a", "role": "both", "host": "x"}]}',
        b'{"engines": [{"name": "a", "role": "decode", "host": "x"}, '
        b'{"name": "a", "role": "decode", "host": "y"}]}',
        b"[]",
    ):
        with pytest.raises(ValueError, match=r"role|unique|engines"):
            parse_endpoints(content)
