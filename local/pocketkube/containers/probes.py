"""Run the HTTP probes of containers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from baton_kube.client import Object
from pocketkube.containers.environment import ConfigError
from pocketkube.ports import container_port

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class ProbeVerdict:
    """Counts consecutive equal results of a probe, and compares the count with a threshold."""

    def __init__(self, success_threshold: int, failure_threshold: int) -> None:
        self._success_threshold = success_threshold
        self._failure_threshold = failure_threshold
        self._last: bool | None = None
        self._run = 0

    def observe(self, success: bool) -> bool | None:
        """Record the result of one probe request.

        Returns:
            True if consecutive successes have reached the success threshold, False if consecutive
            failures have reached the failure threshold, else None.
        """
        self._run = self._run + 1 if success == self._last else 1
        self._last = success
        needed = self._success_threshold if success else self._failure_threshold
        return success if self._run >= needed else None


class ProbeError(Exception):
    """A probe failed. The message is the reason."""


def check_handlers(container: Object) -> None:
    """Check that the container has no lifecycle hooks and only `httpGet` probes.

    Raises:
        ConfigError: the container has a lifecycle hook or another kind of probe.
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


class Probe:
    """One probe of a running container.

    Args:
        spec: a core/v1 Probe as the API server stores it, with its defaults.
        on_failure: called with the message of each failure.
    """

    def __init__(
        self,
        spec: Object,
        container: Object,
        pod_ip: str,
        http: aiohttp.ClientSession,
        on_failure: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._container = container
        self._pod_ip = pod_ip
        self._http = http
        self._on_failure = on_failure
        self._verdict = ProbeVerdict(spec["successThreshold"], spec["failureThreshold"])
        #: Delay before the next request.
        self._delay_s: float = spec.get("initialDelaySeconds", 0)

    async def next_verdict(self) -> tuple[bool, str]:
        """Send probe requests until the results reach the success or failure threshold.

        Returns:
            (True, empty text) at the success threshold, or (False, message of the last failure) at
            the failure threshold.
        """
        while True:
            await asyncio.sleep(self._delay_s)
            self._delay_s = self._spec["periodSeconds"]
            failure = await self._failure()
            if failure:
                self._on_failure(failure)
            healthy = self._verdict.observe(not failure)
            if healthy is not None:
                return healthy, failure

    async def _failure(self) -> str:
        """Send one probe request. Return the reason of a failure, or an empty text on success."""
        timeout_s = self._spec["timeoutSeconds"]
        try:
            await self._get(self._spec["httpGet"], timeout_s)
        except TimeoutError:
            return f"no answer within {timeout_s} s"
        except (OSError, aiohttp.ClientError, ProbeError) as error:
            return str(error) or repr(error)
        return ""

    async def _get(self, action: Object, timeout_s: float) -> None:
        scheme = (action.get("scheme") or "HTTP").lower()
        path = action.get("path") or "/"
        port = container_port(action["port"], [self._container])
        if port is None:
            name = self._container["name"]
            raise ProbeError(f"container {name!r} has no port named {action['port']!r}")
        url = f"{scheme}://{action.get('host') or self._pod_ip}:{port}"
        headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
        async with self._http.get(
            url + (path if path.startswith("/") else f"/{path}"),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            ssl=False,
        ) as response:
            if not 200 <= response.status < 400:
                body = (await response.content.read(200)).decode("utf-8", "replace").strip()
                raise ProbeError(f"HTTP status {response.status} from {url}{path}: {body}")
