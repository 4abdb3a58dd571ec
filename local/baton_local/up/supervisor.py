"""`baton up`: start a local cluster with one LLMService, and request one streamed answer.

The steps are:

1. Link the demo model, or the model that the user names, into the state folder.
2. Start the control plane, apply the CRD and the operator's roles, and start the operator.
3. Start the node: controllers, kubelet and proxy.
4. Apply the user's file, and wait until the service is Ready.
5. Request one streamed answer, and with --agent an answer that needs a tool.

The process then supervises the cluster until Ctrl-C, SIGTERM or `baton down`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.markup import escape

from baton_kube.client import KubeError, Object
from baton_local.cluster_api import ClusterApi, UnknownKindError
from baton_local.kv_bytes import fetch_kv_bytes, format_kv_bytes, kv_bytes_received
from baton_local.manifest_file import as_kubectl_applies, load_documents, load_service
from baton_local.service_status import PodStatus, ServiceStatus
from baton_local.state_dir import ClusterInfo, StateDir, StateDirError
from baton_local.status_tables import ProgressDisplay, service_tables
from baton_local.up.chat_client import AskError, ask
from baton_local.up.demo_model import DEMO_CHECKPOINT, ModelError, provide_model
from baton_local.up.gateway_readiness import are_gateways_connected
from baton_local.up.tool_agent import MAX_TURNS, ready_pods_tool, run_agent
from baton_operator import names
from baton_operator.api.crd import custom_resource_definition
from pocketkube.child_processes import ComponentError
from pocketkube.cluster import Component, LocalCluster
from pocketkube.kubeconfig import write_account_kubeconfig
from pocketkube.networks import NetworksInUseError

PROMPT = "Tell me about the relay race: who hands the baton to whom?"
AGENT_QUESTION = "How many decode pods are ready?"
CONTROL_PLANE_TIMEOUT_S = 60.0
OPERATOR_NAMESPACE = "baton-system"
NODE_NAME = "baton-local"
#: Control characters, except tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: A link to manifests/rbac.
RBAC = Path(__file__).parents[1] / "rbac"


class UpError(Exception):
    """Raised for an error that the user can correct. The message says what to correct."""


@dataclass(frozen=True)
class UpOptions:
    """The command-line options of `baton up`."""

    file: Path
    model: Path | None
    once: bool
    control_plane: str
    ingress_port: int
    timeout_s: float
    max_tokens: int
    agent: bool = False

    @property
    def answer_timeout_s(self) -> float:
        """Maximum seconds from the start of `baton up` to the last answer: a sum of timeouts.

        CONTROL_PLANE_TIMEOUT_S applies to two steps: the start of the control plane and the
        creation of the CRD. `timeout_s` applies to three steps: the wait for Ready, the wait for
        the gateways' connections, and the answer. With --agent, `timeout_s` also applies to each
        request of the agent.
        """
        num_steps = 3 + (MAX_TURNS if self.agent else 0)
        return 2 * CONTROL_PLANE_TIMEOUT_S + num_steps * self.timeout_s


def run_up(options: UpOptions, state: StateDir, console: Console) -> int:
    """Run `baton up`, and return the exit status.

    With --once, the status is 0 if the service has answered and no error occurred. Without --once,
    it is 0 if SIGINT or SIGTERM ended the run. Otherwise, it is 1.
    """
    try:
        documents, service = _read_service(options.file)
        state.acquire()
    except (ValueError, OSError, UpError, StateDirError) as error:
        console.print(f"[red]baton up:[/] {escape(str(error))}")
        return 1
    cluster = LocalCluster(
        state.root,
        control_plane=options.control_plane,
        ingress_port=options.ingress_port,
        node_name=NODE_NAME,
        host_root=state.host_root,
    )
    try:
        return asyncio.run(_Supervisor(options, state, console, cluster, documents, service).run())
    except NetworksInUseError as error:
        console.print(f"[red]baton up:[/] {error} with `baton down`")
        return 1
    except (UpError, ModelError, ComponentError, AskError) as error:
        console.print(f"[red]baton up:[/] {escape(str(error))}")
        return 1
    except (KubeError, ConnectionError, TimeoutError, aiohttp.ClientError) as error:
        console.print(
            f"[red]baton up:[/] {escape(str(error) or repr(error))}; see {escape(str(state.logs))}"
        )
        return 1
    except KeyboardInterrupt:
        return 1
    finally:
        if not options.once:  # with --once the last line reports the KV transfer
            console.print("stopping", style="dim")
        cluster.stop()


@dataclass(eq=False)
class _Supervisor:
    """One run of `baton up`."""

    options: UpOptions
    state: StateDir
    console: Console
    cluster: LocalCluster
    #: The objects of the user's file, and the LLMService among them.
    documents: list[Object]
    service: Object

    def __post_init__(self) -> None:
        self.namespace = self.service["metadata"].setdefault("namespace", "default")
        self.name = self.service["metadata"]["name"]
        self.progress = ProgressDisplay(self.console)
        self.stopped = asyncio.Event()

    async def run(self) -> int:
        """Run until SIGINT or SIGTERM, and return the exit status.

        With --once, the run ends after the service has answered. The status is 1 if a signal ends a
        run with --once before the answer, else 0.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.stopped.set)
        work = asyncio.create_task(self._bring_up())
        stop = asyncio.create_task(self.stopped.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return 1 if self.options.once else 0
        stop.cancel()
        await work
        return 0

    async def _bring_up(self) -> None:
        options, cluster, console = self.options, self.cluster, self.console
        model = provide_model(options.model, self.service, self.state)
        await cluster.start_control_plane(CONTROL_PLANE_TIMEOUT_S)
        async with ClusterApi.connect(cluster.kubeconfig) as api:
            await self._start_operator(api)
            cluster.start_node()
            await self._apply_file(api)
            status = await self._wait_ready(api)
            self._print_next_steps(status)
            if model == DEMO_CHECKPOINT:
                console.print(
                    "\nThe demo model is a toy that knows a hundred sentences.", style="dim"
                )
            await self._answer(api, status)
            self._record(status.endpoint)
            if not options.once:
                console.print("\nRunning until Ctrl-C.", style="dim")
                await self._watch(api)

    async def _start_operator(self, api: ClusterApi) -> None:
        # The operator has the same rights as in a cluster. A real control plane enforces them.
        rbac = [obj for file in sorted(RBAC.glob("*.yaml")) for obj in load_documents(file)]
        await api.apply([custom_resource_definition(rules=await api.supports_rules()), *rbac])
        await _until(api.crd_established, CONTROL_PLANE_TIMEOUT_S, "the CRD was not established")
        token = await api.account_token(OPERATOR_NAMESPACE, names.MANAGER)
        kubeconfig = write_account_kubeconfig(
            self.cluster.kubeconfig, self.cluster.kubeconfig.with_name("operator.kubeconfig"), token
        )
        # The operator starts after the requests above, because many starting processes would slow
        # these requests down.
        command = [
            str(Path(sys.executable).parent / "baton-operator"),
            *("--kubeconfig", str(kubeconfig)),
            *("--http-port", "0"),
            # The cluster has one user, whose model may be any folder of this machine.
            *("--templates", "unrestricted"),
        ]
        self.cluster.start(Component("operator", command, {"POD_IP": "127.0.0.1"}))

    async def _apply_file(self, api: ClusterApi) -> None:
        """Apply the objects of the user's file. Then write the ClusterInfo without an endpoint."""
        file = self.options.file
        try:
            await api.apply([as_kubectl_applies(document) for document in self.documents])
        except (KubeError, UnknownKindError) as error:
            raise UpError(f"{file} was refused: {error}") from None
        self._record(endpoint="")

    def _record(self, endpoint: str) -> None:
        """Write the ClusterInfo with which other `baton` commands find the running cluster.

        Args:
            endpoint: URL at which the service has answered; empty before its first answer.
        """
        self.state.write_info(
            ClusterInfo(
                supervisor_pid=os.getpid(),
                kubeconfig=str(self.cluster.kubeconfig),
                namespace=self.namespace,
                service=self.name,
                file=str(self.options.file.absolute()),
                endpoint=endpoint,
            )
        )

    async def _wait_ready(self, api: ClusterApi) -> ServiceStatus:
        deadline = time.monotonic() + self.options.timeout_s
        with self.progress:
            while True:
                self.cluster.check()
                status = await api.service(self.namespace, self.name)
                self.progress.show(status)
                if status.ready and status.endpoint:
                    return status
                failure = status.final_failure
                if failure is not None or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.2)
        self.console.print(service_tables(status))
        for pod in status.pods:
            if not pod.ready:
                await self._print_last_lines(api, pod)
        if failure is not None:
            raise UpError(
                f"{self.namespace}/{self.name} cannot become Ready: {failure.reason}: "
                f"{failure.message}\nCorrect this in {self.options.file} or on this machine, and "
                "run `baton up` again. docs/operate/troubleshooting.md explains each reason."
            )
        raise UpError(
            f"{self.namespace}/{self.name} was not Ready within {self.options.timeout_s:g} s; "
            f"more is in {self.cluster.logs}"
        )

    async def _print_last_lines(self, api: ClusterApi, pod: PodStatus) -> None:
        ended = pod.restarts > 0  # the running container has not failed yet
        self.console.print(f"\n[bold]last lines of {pod.name}{' before its restart' * ended}[/]")
        log = api.log(self.namespace, pod.name, follow=False, tail=10, previous=ended)
        try:
            async for chunk in log:
                self.console.out(chunk.decode(errors="replace"), end="")
        except KubeError as error:
            self.console.print(escape(str(error)), style="dim")

    async def _watch(self, api: ClusterApi) -> None:
        """Until `stopped` is set, restart ended components and show the service's status."""
        exists = True
        while not self.stopped.is_set():
            for component in self.cluster.heal():
                self.console.print(
                    f"{component} has ended and was restarted; see `baton logs {component}`"
                )
            try:
                self.progress.show(await api.service(self.namespace, self.name))
                exists = True
            except KubeError as error:
                if error.status != 404:
                    raise
                if exists:
                    self.console.out(
                        f"{self.namespace}/{self.name} was deleted; "
                        f"`kubectl apply -f {self.options.file.absolute()}` creates it again",
                        highlight=False,
                    )
                exists = False
            await asyncio.sleep(0.5)

    def _print_next_steps(self, status: ServiceStatus) -> None:
        file, elapsed_s = self.options.file.absolute(), self.progress.elapsed_s
        self.console.print(
            f"\n[bold green]Ready[/] after {elapsed_s:.1f} s: [bold]{status.endpoint}[/]\n"
        )
        request = {
            "model": status.model,
            "stream": True,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        chat = f"{status.endpoint}/v1/chat/completions"
        lines = [
            f"export KUBECONFIG={status.kubeconfig}",
            f"kubectl get llms,pods; kubectl scale llms/{status.service} --replicas=3",
            f"${{EDITOR:-vi}} {file}; kubectl apply -f {file}",
            f"curl {status.endpoint}/v1/models",
            f"curl -N {chat} -H 'Content-Type: application/json' \\\n"
            f"    -d '{json.dumps(request)}'",
        ]
        if status.ingress:
            lines.append(f"curl {status.ingress}/v1/models")
        for line in lines:
            self.console.out("  " + line, highlight=False)

    async def _answer(self, api: ClusterApi, status: ServiceStatus) -> None:
        """Send one prompt, and print the answer, its timing and the size of the KV transfer.

        With --agent, an agent answers a second question before the size is printed. The size
        includes the transfers for the agent's requests. Without prefill pods, no size is printed.
        """
        options, console = self.options, self.console

        async def is_connected() -> bool:
            return await are_gateways_connected(
                (await api.service(status.namespace, status.service)).pods
            )

        await _until(
            is_connected, options.timeout_s, "the gateway did not connect to all ready engines"
        )
        before = kv_bytes_received((await fetch_kv_bytes(status)).pods)
        console.print(f"\n[bold]> {PROMPT}[/]")
        answer = await ask(
            status.endpoint,
            status.model,
            PROMPT,
            max_tokens=options.max_tokens,
            on_text=lambda text: console.out(_printable(text), end="", highlight=False),
            timeout_s=options.timeout_s,
        )
        console.print(
            f"\nTTFT {answer.ttft_s * 1e3:.0f} ms, {answer.tokens} tokens, "
            f"{answer.tokens_per_s:.1f} tokens/s",
            highlight=False,
        )
        if options.agent:
            await self._run_agent(api, status)
        now = await fetch_kv_bytes(await api.service(status.namespace, status.service))
        if any(pod.role == "prefill" for pod in now.pods):
            moved = kv_bytes_received(now.pods) - before
            if not moved:
                raise UpError(
                    "no KV bytes moved from prefill to decode; "
                    "see the engines' logs with `baton logs`"
                )
            console.out(
                f"KV moved from prefill to decode: {format_kv_bytes(moved)}", highlight=False
            )

    async def _run_agent(self, api: ClusterApi, status: ServiceStatus) -> None:
        """Let the model call a tool to answer a question about this cluster. Print each step."""

        def print_line(line: str) -> None:
            self.console.out(_printable(line), highlight=False)

        self.console.print(f"\n[bold]> {AGENT_QUESTION}[/]")
        await run_agent(
            status.endpoint,
            status.model,
            AGENT_QUESTION,
            [ready_pods_tool(api, status)],
            max_tokens=self.options.max_tokens,
            timeout_s=self.options.timeout_s,
            print_line=print_line,
        )


def _read_service(path: Path) -> tuple[list[Object], Object]:
    documents, service = load_service(path)
    spec = service.get("spec", {})
    for field, value in (
        ("spec", spec),
        ("spec.model", spec.get("model", {}) if isinstance(spec, dict) else {}),
    ):
        if not isinstance(value, dict):
            raise UpError(f"{path}: {field} must be an object, got {value!r}")
    return documents, service


def _printable(text: str) -> str:
    """Return a model's `text` without the control characters that a terminal interprets."""
    return _CONTROL.sub("", text)


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float, message: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise UpError(f"{message} within {timeout_s:g} s; see the logs with `baton logs`")
        await asyncio.sleep(0.05)
