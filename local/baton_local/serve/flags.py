"""The flags of `baton serve`."""

from __future__ import annotations

import argparse

from baton_protocol.options import arguments
from baton_protocol.options.option import comma_separated
from pocketkube.ports import LOOPBACK

#: Engine flags that `baton serve` sets itself, or that have no meaning without Kubernetes.
RESERVED_FLAGS = (
    "--model",
    "--config",
    "--engine-port",
    "--http-port",
    "--kv-role",
    "--kv-port",
    "--service-key-file",
)


def flags_parser() -> argparse.ArgumentParser:
    """Return a parser for the flags that `baton serve` handles itself.

    The caller passes all other flags to the engine.
    """
    parser = argparse.ArgumentParser(prog="baton serve MODEL", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--host", default=LOOPBACK, help="address of the endpoint (default 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=arguments.port,
        default=8000,
        help="port of the endpoint (default 8000; 0: a free port)",
    )
    parser.add_argument(
        "--metrics-port",
        type=arguments.port,
        default=0,
        help="port of /metrics on 127.0.0.1, without a key (default 0: a free port)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="model name that clients use (default: the folder's, or ORG/NAME)",
    )
    parser.add_argument(
        "--revision", help="branch, tag or commit of a model ORG/NAME of a hub (default main)"
    )
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        help="cache of downloaded models (default $XDG_CACHE_HOME/baton/models, or "
        "~/.cache/baton/models)",
    )
    parser.add_argument(
        "--max-concurrent-requests", type=int, metavar="N", help="sequences served at once"
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        help="auto takes default sampling parameters from the checkpoint (default auto)",
    )
    parser.add_argument(
        "--allowed-origins",
        type=comma_separated,
        default=[],
        metavar="ORIGINS",
        help="origins whose web pages may call the endpoint: https://chat.example.com, or *",
    )
    parser.add_argument(
        "--min-priority",
        type=int,
        default=0,
        metavar="N",
        help="requests with a lower priority are refused; lower values run first (default 0)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=arguments.not_negative,
        metavar="SECONDS",
        help="a request that takes longer fails (default 0: no limit)",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=arguments.positive,
        default=30.0,
        metavar="SECONDS",
        help="time for running requests to finish at the end (default 30)",
    )
    parser.add_argument(
        "--ready-timeout-s",
        type=arguments.positive,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the engine and the gateway to be ready (default 600)",
    )
    return parser
