"""The `baton` command.

baton serve MODEL [FLAGS]                       one engine and its OpenAI endpoint
baton up -f FILE [--model DIR] [--agent] [--once|--detach]  a local cluster around one LLMService
baton plan [OLD] NEW [-o json]                  the steps of a rollout or resize
baton status [-o json] · baton logs [NAME] [-f] · baton down
baton checkpoint create --arch ARCH --out DIR   a checkpoint with random weights
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from baton_local.state_dir import ClusterInfo, StateDir, StateDirError
from baton_local.up.detach import run_detached
from baton_protocol.options import arguments

if TYPE_CHECKING:
    from baton_local.service_status import ServiceStatus

#: Largest value of --ready-after and --drain-after, in seconds: about 116 days.
MAX_SIMULATED_S = 1e7

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class NoClusterError(Exception):
    """Raised when no local cluster is running, or when the API server does not answer."""


def main() -> None:
    """Run the `baton` command with this process's arguments, and exit with its status."""
    try:
        Path.home()
    except RuntimeError:
        # Neither HOME nor a passwd entry exists. Libraries read the home folder on import.
        os.environ["HOME"] = "/"
    args = _parser().parse_args()
    try:
        sys.exit(args.run(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except (NoClusterError, StateDirError) as error:
        sys.exit(f"baton: {error}")
    except BrokenPipeError:  # `baton logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="LLM serving on Kubernetes, and on this one machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    adders = (_add_serve, _add_up, _add_plan, _add_status, _add_logs, _add_down, _add_checkpoint)
    for add in adders:
        add(commands)
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="one engine and its OpenAI endpoint",
        usage="baton serve MODEL [FLAGS]",
        epilog=(
            "FLAGS are the flags of `baton serve MODEL --help`, "
            "and the engine's own (`baton-engine --help`)."
        ),
    )
    serve.add_argument("model", metavar="MODEL", help="checkpoint folder, or ORG/NAME of a hub")
    flags = serve.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="after MODEL"
    )
    flags.required = False  # otherwise argparse names FLAGS when MODEL is missing
    serve.set_defaults(run=_run_serve)


def _run_serve(args: argparse.Namespace) -> int:
    from baton_local.serve.server import run_serve

    return run_serve(args.model, args.flags)


def _add_up(commands: _Commands) -> None:
    # No abbreviations, because --detach is removed from the command line by name.
    up = commands.add_parser(
        "up", help="start a local cluster around one LLMService", allow_abbrev=False
    )
    up.add_argument("-f", "--file", type=Path, required=True, help="YAML with one LLMService")
    up.add_argument(
        "--model", type=Path, help="folder of the model, served instead of spec.model.uri"
    )
    up.add_argument(
        "--agent",
        action="store_true",
        help="also answer a question with a tool that reads the cluster, and print each step",
    )
    mode = up.add_mutually_exclusive_group()
    mode.add_argument(
        "--once", action="store_true", help="exit after one answer: 0, or 1 if anything failed"
    )
    mode.add_argument(
        "--detach", action="store_true", help="return after one answer, leave the cluster running"
    )
    up.add_argument(
        "--control-plane",
        choices=["embedded", "real"],
        default="embedded",
        help="the API server: Baton's own, or kube-apiserver with etcd (default: embedded)",
    )
    up.add_argument(
        "--ingress-port",
        type=arguments.port,
        default=0,
        help="port of the Ingress proxy on 127.0.0.1 (default: a free port)",
    )
    up.add_argument(
        "--timeout",
        type=arguments.positive,
        default=180.0,
        metavar="SECONDS",
        help="longest wait for Ready, and then for the answer (default 180)",
    )
    up.add_argument(
        "--max-tokens", type=int, default=96, help="longest answer in tokens (default 96)"
    )
    up.set_defaults(run=_run_up)


def _run_up(args: argparse.Namespace) -> int:
    from baton_local.status_tables import make_console
    from baton_local.up.supervisor import UpOptions, run_up

    options = UpOptions(
        file=args.file,
        model=args.model,
        once=args.once,
        control_plane=args.control_plane,
        ingress_port=args.ingress_port,
        timeout_s=args.timeout,
        max_tokens=args.max_tokens,
        agent=args.agent,
    )
    if args.detach:
        flags = [arg for arg in sys.argv[1:] if arg != "--detach"]
        command = [sys.executable, "-P", "-m", "baton_local.cli", *flags]
        return run_detached(command, options.answer_timeout_s, StateDir(), make_console())
    return run_up(options, StateDir(), make_console())


def _add_plan(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan", help="print every step of a rollout or resize, without a cluster"
    )
    plan.add_argument(
        "old",
        nargs="?",
        type=Path,
        metavar="OLD",
        help="YAML with one LLMService, rolled out and ready",
    )
    plan.add_argument(
        "new",
        type=Path,
        metavar="NEW",
        help="YAML with the same LLMService after the edit; without OLD: a new LLMService",
    )
    plan.add_argument(
        "--steps",
        type=arguments.count,
        default=200,
        metavar="N",
        help="largest number of steps in the plan (default 200)",
    )
    plan.add_argument(
        "--ready-after",
        type=_simulated_s,
        default=30.0,
        metavar="SECONDS",
        help="time from the start of a new pod until it is ready (default 30)",
    )
    plan.add_argument(
        "--drain-after",
        type=_simulated_s,
        default=5.0,
        metavar="SECONDS",
        help="time in which a draining pod finishes its requests (default 5)",
    )
    plan.add_argument(
        "--never-ready", action="store_true", help="pods of the new spec never become ready"
    )
    plan.add_argument(
        "--capacity",
        type=arguments.count,
        metavar="N",
        help="number of prefill and decode pods that fit on the nodes",
    )
    plan.add_argument("-o", "--output", choices=["text", "json"], default="text")
    plan.set_defaults(run=_run_plan)


def _simulated_s(text: str) -> float:
    """Parse a simulated duration in seconds, from 0 to MAX_SIMULATED_S."""
    value = arguments.not_negative(text)
    if value > MAX_SIMULATED_S:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_SIMULATED_S:g} s, got {text}")
    return value


def _run_plan(args: argparse.Namespace) -> int:
    from baton_local.plan import run_plan
    from baton_local.preview.simulated_cluster import Conditions

    conditions = Conditions(
        ready_after_s=args.ready_after,
        drain_after_s=args.drain_after,
        never_ready=args.never_ready,
        capacity=args.capacity,
    )
    return run_plan(
        [path for path in (args.old, args.new) if path is not None],
        conditions,
        args.steps,
        args.output,
    )


def _running_cluster() -> ClusterInfo:
    """Return the description of the running cluster.

    Raises:
        NoClusterError: no cluster is running, or the cluster is still starting.
    """
    state = StateDir()
    info = state.read_info()
    if info is None:
        what = (
            "is still starting"
            if state.supervisor()
            else f"is not running (no `baton up` uses {state.root})"
        )
        raise NoClusterError(f"the local cluster {what}; start one with `baton up -f FILE`")
    return info


async def _status(info: ClusterInfo) -> ServiceStatus | None:
    """Return the status of the cluster's LLMService; None if the LLMService was deleted.

    Raises:
        NoClusterError: the API server does not answer.
    """
    from baton_kube.client import KubeError
    from baton_local.cluster_api import ClusterApi

    async with ClusterApi.connect(Path(info.kubeconfig)) as api:
        try:
            return await api.service(info.namespace, info.service)
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        except OSError as error:
            raise NoClusterError(
                f"the cluster does not answer ({error}); see {StateDir().logs}"
            ) from None


def _add_status(commands: _Commands) -> None:
    status = commands.add_parser("status", help="service, conditions, endpoint, pods, kubeconfig")
    status.add_argument("-o", "--output", choices=["table", "json"], default="table")
    status.set_defaults(run=_run_status)


def _run_status(args: argparse.Namespace) -> int:
    info = _running_cluster()  # before the slow imports, so that an error is printed at once
    from baton_local.kv_bytes import fetch_kv_bytes
    from baton_local.service_status import ServiceStatus, with_pids
    from baton_local.status_tables import make_console, print_status

    found = asyncio.run(_status(info))
    if found is not None:
        status = with_pids(asyncio.run(fetch_kv_bytes(found)))
    else:
        make_console(stderr=True).print(
            f"[red]baton status:[/] LLMService {info.namespace}/{info.service} was deleted"
        )
        status = ServiceStatus(
            service=info.service,
            namespace=info.namespace,
            endpoint="",
            model="",
            conditions=[],
            pods=[],
            ingress="",
            kubeconfig=info.kubeconfig,
            exists=False,
        )
    if args.output == "json":
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print_status(status, info.file)
    return 0 if status.exists else 1


def _add_logs(commands: _Commands) -> None:
    logs = commands.add_parser("logs", help="log of a pod, or of a component of the local cluster")
    logs.add_argument(
        "name",
        nargs="?",
        help="pod, role of pods (decode, prefill, gateway, coordinator), or component "
        "(control-plane, kubelet, controllers, proxy, operator, supervisor); default: all pods",
    )
    logs.add_argument("-f", "--follow", action="store_true")
    logs.add_argument("--tail", type=int, default=None, metavar="LINES")
    logs.set_defaults(run=_run_logs)


def _run_logs(args: argparse.Namespace) -> int:
    info = _running_cluster()
    component = StateDir().logs / f"{args.name}.log"
    if args.name and component.is_file():
        tail = [
            "tail",
            "-n",
            str(args.tail) if args.tail is not None else "+1",
            *(["-F"] if args.follow else []),
            str(component),
        ]
        return subprocess.run(tail, check=False).returncode
    return asyncio.run(_print_logs(info, args.name, args.follow, args.tail))


async def _print_logs(info: ClusterInfo, name: str | None, follow: bool, tail: int | None) -> int:
    from baton_kube.client import KubeError
    from baton_local.cluster_api import ClusterApi

    status = await _status(info)
    known = status.pods if status else []
    pods = [pod.name for pod in known if name in (None, pod.name, pod.role)]
    if name and not pods:  # may be a pod of another service
        pods = [name]
    async with ClusterApi.connect(Path(info.kubeconfig)) as api:

        async def copy(pod: str) -> int:
            prefix = f"[{pod}] " if len(pods) > 1 else ""
            rest = b""
            try:
                async for chunk in api.log(info.namespace, pod, follow=follow, tail=tail):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        print(prefix + line.decode(errors="replace"), flush=follow)
            except KubeError as error:
                print(f"{prefix}{error}", file=sys.stderr)
                if error.status == 404 and pods == [name]:
                    names = {text for each in known for text in (each.role, each.name)}
                    names |= {path.stem for path in StateDir().logs.glob("*.log")}
                    print(f"try one of: {', '.join(sorted(names))}", file=sys.stderr)
                return 1
            if rest:
                print(prefix + rest.decode(errors="replace"))
            return 0

        return max(await asyncio.gather(*map(copy, pods)), default=0)


def _add_down(commands: _Commands) -> None:
    commands.add_parser("down", help="end the local cluster").set_defaults(run=_run_down)


def _run_down(args: argparse.Namespace) -> int:
    stopped = StateDir().stop_supervisor(timeout_s=60.0)
    print("stopped" if stopped else "no local cluster was running")
    return 0


def _add_checkpoint(commands: _Commands) -> None:
    checkpoint = commands.add_parser("checkpoint", help="make checkpoints")
    checkpoint_commands = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    create = checkpoint_commands.add_parser(
        "create", help="write a Hugging Face folder with random weights"
    )
    # Only for this command, because importing torch takes seconds.
    if sys.argv[1:3] == ["checkpoint", "create"]:
        from baton_engine import random_checkpoint

        random_checkpoint.add_arguments(create)
        create.set_defaults(run=random_checkpoint.run)


if __name__ == "__main__":
    main()
