"""Probes and lifecycle hooks of containers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp

from baton_kube.client import Object
from pocketkube.containers.process import Guard, StartError, run_command


@dataclass(frozen=True)
class ProbeTiming:
    """Intervals in seconds and thresholds of a probe, with the API's defaults."""

    initial_delay_s: float = 0
    period_s: float = 10
    timeout_s: float = 1
    success_threshold: int = 1
    failure_threshold: int = 3

    @classmethod
    def of(cls, probe: Object) -> Self:
        """Read a core/v1 Probe."""
        return cls(
            initial_delay_s=probe.get("initialDelaySeconds") or 0,
            period_s=probe.get("periodSeconds") or 10,
            timeout_s=probe.get("timeoutSeconds") or 1,
            success_threshold=probe.get("successThreshold") or 1,
            failure_threshold=probe.get("failureThreshold") or 3,
        )


class ProbeVerdict:
    """Counts equal results in a row. The verdict changes at a threshold."""

    def __init__(self, timing: ProbeTiming):
        self._timing = timing
        self._last: bool | None = None
        self._run = 0

    def observe(self, success: bool) -> bool | None:
        """Return the verdict if `success` has reached its threshold, else None."""
        self._run = self._run + 1 if success == self._last else 1
        self._last = success
        needed = self._timing.success_threshold if success else self._timing.failure_threshold
        return success if self._run >= needed else None


class HandlerError(Exception):
    """A probe or hook failed; the text has the reason."""


@dataclass(frozen=True)
class HandlerContext:
    """The running container that a handler acts on."""

    container: Object
    pod_ip: str
    env: dict[str, str]
    cwd: Path
    guard: Guard
    http: aiohttp.ClientSession


async def call_handler(handler: Object, context: HandlerContext, timeout_s: float) -> None:
    """Run the `httpGet`, `tcpSocket` or `exec` of a probe or hook.

    Raises:
        HandlerError: it failed.
    """
    try:
        if action := handler.get("httpGet"):
            await _http_get(action, context, timeout_s)
        elif action := handler.get("tcpSocket"):
            await _tcp_connect(action, context, timeout_s)
        elif action := handler.get("exec"):
            code, output = await run_command(
                action["command"], context.env, context.cwd, context.guard, timeout_s
            )
            if code != 0:
                raise HandlerError(f"command {action['command']} exited with {code}: {output}")
        else:
            raise HandlerError(
                f"unsupported handler {sorted(handler)}; use httpGet, tcpSocket or exec"
            )
    except TimeoutError:
        raise HandlerError(f"no answer within {timeout_s:g} s") from None
    except (OSError, aiohttp.ClientError, StartError) as error:
        raise HandlerError(str(error) or repr(error)) from error


async def run_probe(
    probe: Object,
    context: HandlerContext,
    on_verdict: Callable[[bool, str], Awaitable[bool]],
    on_failure: Callable[[str], None],
) -> None:
    """Probe until `on_verdict` returns False.

    Args:
        on_verdict: called with (healthy, message) at each threshold; returns whether to continue.
        on_failure: called with the message of each failure.
    """
    timing = ProbeTiming.of(probe)
    verdict = ProbeVerdict(timing)
    await asyncio.sleep(timing.initial_delay_s)
    while True:
        message = ""
        try:
            await call_handler(probe, context, timing.timeout_s)
        except HandlerError as error:
            message = str(error)
            on_failure(message)
        healthy = verdict.observe(not message)
        if healthy is not None and not await on_verdict(healthy, message):
            return
        await asyncio.sleep(timing.period_s)


def resolve_port(port: int | str, container: Object) -> int:
    """Return a port given by number or by the name of a container port.

    Raises:
        HandlerError: the container has no port of that name.
    """
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for entry in container.get("ports") or []:
        if entry.get("name") == port:
            return int(entry["containerPort"])
    raise HandlerError(f"container {container['name']!r} has no port named {port!r}")


async def _http_get(action: Object, context: HandlerContext, timeout_s: float) -> None:
    scheme = (action.get("scheme") or "HTTP").lower()
    path = action.get("path") or "/"
    port = resolve_port(action["port"], context.container)
    url = f"{scheme}://{action.get('host') or context.pod_ip}:{port}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with context.http.get(
        url + (path if path.startswith("/") else f"/{path}"),
        headers=headers,
        timeout=timeout,
        ssl=False,
    ) as response:
        if not 200 <= response.status < 400:
            body = (await response.content.read(200)).decode("utf-8", "replace").strip()
            raise HandlerError(f"HTTP status {response.status} from {url}{path}: {body}")


async def _tcp_connect(action: Object, context: HandlerContext, timeout_s: float) -> None:
    host = action.get("host") or context.pod_ip
    port = resolve_port(action["port"], context.container)
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()
