"""HTTP probes of containers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from baton_kube.client import Object
from pocketkube.containers.environment import ConfigError
from pocketkube.ports import container_port

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class ProbeVerdict:
    """Counts equal results in a row. The verdict changes at a threshold."""

    def __init__(self, success_threshold: int, failure_threshold: int) -> None:
        self._success_threshold = success_threshold
        self._failure_threshold = failure_threshold
        self._last: bool | None = None
        self._run = 0

    def observe(self, success: bool) -> bool | None:
        """Return the verdict if `success` has reached its threshold, else None."""
        self._run = self._run + 1 if success == self._last else 1
        self._last = success
        needed = self._success_threshold if success else self._failure_threshold
        return success if self._run >= needed else None


class ProbeError(Exception):
    """A probe failed; the text has the reason."""


@dataclass(frozen=True)
class ProbeTarget:
    """The running container that a probe checks."""

    container: Object
    pod_ip: str
    http: aiohttp.ClientSession


def check_handlers(container: Object) -> None:
    """Check that the container has no hooks, and only `httpGet` probes.

    Raises:
        ConfigError: it has a hook or another probe.
    """
    if container.get("lifecycle"):
        raise ConfigError(
            f"container {container['name']!r}: lifecycle hooks are not supported here"
        )
    for kind in PROBES:
        if (probe := container.get(kind)) and not probe.get("httpGet"):
            raise ConfigError(
                f"container {container['name']!r}: {kind} is not supported here; use httpGet"
            )


async def run_probe(
    probe: Object,
    target: ProbeTarget,
    on_verdict: Callable[[bool, str], Awaitable[bool]],
    on_failure: Callable[[str], None],
) -> None:
    """Probe until `on_verdict` returns False.

    Args:
        probe: a core/v1 Probe as the API server stores it, with its defaults.
        on_verdict: called with (healthy, message) at each threshold; returns whether to continue.
        on_failure: called with the message of each failure.
    """
    verdict = ProbeVerdict(probe["successThreshold"], probe["failureThreshold"])
    timeout_s = probe["timeoutSeconds"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        message = ""
        try:
            await _http_get(probe["httpGet"], target, timeout_s)
        except TimeoutError:
            message = f"no answer within {timeout_s} s"
        except (OSError, aiohttp.ClientError, ProbeError) as error:
            message = str(error) or repr(error)
        if message:
            on_failure(message)
        healthy = verdict.observe(not message)
        if healthy is not None and not await on_verdict(healthy, message):
            return
        await asyncio.sleep(probe["periodSeconds"])


async def _http_get(action: Object, target: ProbeTarget, timeout_s: float) -> None:
    scheme = (action.get("scheme") or "HTTP").lower()
    path = action.get("path") or "/"
    port = container_port(action["port"], [target.container])
    if port is None:
        name = target.container["name"]
        raise ProbeError(f"container {name!r} has no port named {action['port']!r}")
    url = f"{scheme}://{action.get('host') or target.pod_ip}:{port}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with target.http.get(
        url + (path if path.startswith("/") else f"/{path}"),
        headers=headers,
        timeout=timeout,
        ssl=False,
    ) as response:
        if not 200 <= response.status < 400:
            body = (await response.content.read(200)).decode("utf-8", "replace").strip()
            raise ProbeError(f"HTTP status {response.status} from {url}{path}: {body}")
