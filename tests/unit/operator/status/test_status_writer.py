"""The status is written only if it has changed."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from baton_kube.client import KubeError, Object
from baton_operator.api.llmservice import Status
from baton_operator.kube.objects import Kube
from baton_operator.status.status_writer import write_status

STATUS = msgspec.convert({"observedGeneration": 3, "endpoint": "http://x"}, Status)


class Server:
    """An API server that records merge patches."""

    def __init__(self, error: KubeError | None = None) -> None:
        self.error = error
        self.patches: list[dict[str, Any]] = []

    async def merge(self, *args: Any) -> Object:
        self.patches.append(args[3])
        if self.error is not None:
            raise self.error
        return {}


def service(status: dict[str, Any]) -> Object:
    return {"metadata": {"namespace": "n", "name": "demo", "uid": "u"}, "status": status}


async def test_an_unchanged_status_is_not_written() -> None:
    server = Server()
    applied = {**msgspec.to_builtins(STATUS), "of another version": 1}
    present = {name: value for name, value in applied.items() if value is not None}
    assert await write_status(cast(Kube, server), service(present), STATUS) is None
    assert server.patches == []


async def test_a_changed_status_is_written_to_the_service_that_was_read() -> None:
    server = Server()
    before = {"observedGeneration": 2, "decode": {"replicas": 1}}
    assert await write_status(cast(Kube, server), service(before), STATUS) == {}
    [patch] = server.patches
    assert patch["metadata"] == {"uid": "u"}
    assert patch["status"]["observedGeneration"] == 3
    assert "decode" not in patch["status"]  # no group was observed


@pytest.mark.parametrize(("code", "is_raised"), [(404, False), (409, True)])
async def test_a_deleted_service_is_no_error(code: int, is_raised: bool) -> None:
    server = cast(Kube, Server(KubeError(code, "x", "x")))
    if is_raised:
        with pytest.raises(KubeError):
            await write_status(server, service({}), STATUS)
    else:
        assert await write_status(server, service({}), STATUS) is None
