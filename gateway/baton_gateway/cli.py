"""The `baton-gateway` command: reads a configuration file and flags, then runs the gateway.

An invalid configuration ends the process with exit code 78. The last line on stderr is then
`FATAL <Reason>: <message>`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton_gateway.http.connections import raise_descriptor_limit
from baton_gateway.http.request_id import LogFormatter
from baton_gateway.routing.discovery import Discovery
from baton_gateway.routing.file_discovery import FileDiscovery
from baton_gateway.server import Gateway
from baton_protocol.options.config import DiscoveryConfig, GatewayConfig, container_path, pod_ip
from baton_protocol.options.option import add_flags, options, set_field
from baton_protocol.process.fatal import ConfigurationError, FlagParser, report_fatal
from baton_protocol.service_key import ServiceKeyError
from baton_text.generation_defaults import GenerationDefaults
from baton_text.tokenizer import Tokenizer

#: Lower bound of heartbeat_timeout_s, in heartbeat intervals. With less, one late heartbeat would
#: disconnect an engine.
MIN_HEARTBEATS = 3

#: Thresholds of the garbage collector. With Python's defaults (700, 10, 10), full collections stall
#: the event loop for 60 ms, several times a minute, if many outputs wait.
GC_THRESHOLDS = (2_000, 20, 200)

#: Options that the gateway's command line has. Only engines read the excluded options.
OPTIONS = [
    option
    for option in options(GatewayConfig)
    if not option.path.startswith("model.") or option.path in ("model.path", "model.served_name")
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway. Return the exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        raise_descriptor_limit()
        tokenizer = load_tokenizer(config)
        discovery = make_discovery(config.discovery)
        gateway = make_gateway(config, tokenizer, discovery, load_defaults(config))
    except ConfigurationError as error:
        return report_fatal(error.reason, error)
    gc.collect()
    gc.freeze()  # the collector need not visit modules and the tokenizer
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(gateway.serve_until_signal(pod_ip()))
    return 0


def load_config(argv: Sequence[str]) -> GatewayConfig:
    """Return the configuration: the content of the `--config` file, overridden by flags.

    Raises:
        ConfigurationError: reason InvalidConfig if the file or a flag is invalid.
    """
    args = _parser().parse_args(argv)
    content: dict[str, Any] = {}
    if args.config is not None:
        try:
            content = msgspec.json.decode(
                container_path(args.config).read_bytes(), type=dict[str, Any]
            )
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError("InvalidConfig", f"{args.config}: {error}") from error
    for option in OPTIONS:
        if (value := getattr(args, option.path)) is not None:
            set_field(content, option.path, value)
    content.setdefault("discovery", {})
    try:
        config = msgspec.convert(content, GatewayConfig)
    except msgspec.ValidationError as error:
        hint = "; set it in --config FILE or with --model" if "model" not in content else ""
        raise ConfigurationError("InvalidConfig", f"{error}{hint}") from error
    for option in OPTIONS:
        if problem := option.problem(config):
            raise ConfigurationError("InvalidConfig", f"{option.path} {problem}")
    if config.access.max_concurrent_per_client is not None and not config.access.api_keys_dir:
        raise ConfigurationError(
            "InvalidConfig",
            "access.max_concurrent_per_client needs access.api_keys_dir: without API keys, clients "
            "cannot be told apart",
        )
    if not config.heartbeat_timeout_s >= MIN_HEARTBEATS * config.heartbeat_interval_s:
        raise ConfigurationError(
            "InvalidConfig",
            f"heartbeat_timeout_s must be at least {MIN_HEARTBEATS} times heartbeat_interval_s, "
            f"got {config.heartbeat_timeout_s} and {config.heartbeat_interval_s}: otherwise one "
            "late heartbeat would disconnect an engine",
        )
    return config


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="baton-gateway", description="OpenAI HTTP in front of Baton's engines."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a GatewayConfig as JSON; flags override its fields"
    )
    add_flags(parser, OPTIONS)
    return parser


def load_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Load the model's tokenizer.

    Raises:
        ConfigurationError: reason ModelNotFound if the folder or its tokenizer.json is missing,
            InvalidTokenizer if a file cannot be used.
    """
    folder: Path = container_path(config.model.path)
    if not folder.is_dir():
        raise ConfigurationError(
            "ModelNotFound",
            f"{config.model.path} does not exist: --model must be the folder of a checkpoint on "
            "this machine; nothing is downloaded",
        )
    try:
        return Tokenizer.from_folder(folder)
    except FileNotFoundError as error:
        raise ConfigurationError("ModelNotFound", str(error)) from error
    except ValueError as error:
        raise ConfigurationError("InvalidTokenizer", str(error)) from error


def load_defaults(config: GatewayConfig) -> GenerationDefaults:
    """Load the model's defaults for sampling parameters that requests leave out.

    Raises:
        ConfigurationError: reason ModelInvalid if generation_config.json is malformed.
    """
    if config.generation_config == "none":
        return GenerationDefaults()
    try:
        return GenerationDefaults.from_folder(container_path(config.model.path))
    except ValueError as error:
        raise ConfigurationError("ModelInvalid", str(error)) from error


def make_gateway(
    config: GatewayConfig, tokenizer: Tokenizer, discovery: Discovery, defaults: GenerationDefaults
) -> Gateway:
    """Build the gateway.

    Raises:
        ConfigurationError: reason InvalidAccess if the API keys or the certificate cannot be read,
            ServiceKeyInvalid if the service key cannot be loaded.
    """
    try:
        return Gateway(config, tokenizer, discovery, defaults)
    except OSError as error:
        raise ConfigurationError("InvalidAccess", f"API keys or certificate: {error}") from error
    except ServiceKeyError as error:
        raise ConfigurationError("ServiceKeyInvalid", str(error)) from error


def make_discovery(config: DiscoveryConfig) -> Discovery:
    """Return the engine discovery that `config` selects: from a file or from Kubernetes.

    Raises:
        ConfigurationError: reason InvalidConfig unless exactly one of file and service is set.
    """
    if bool(config.file) == bool(config.service):
        raise ConfigurationError("InvalidConfig", "discovery: set exactly one of file and service")
    if config.file:
        return FileDiscovery(container_path(config.file))
    # This import is slow, and file discovery does not need it.
    from baton_gateway.routing.kubernetes_discovery import KubernetesDiscovery

    return KubernetesDiscovery(
        config.namespace or "default", config.service, resync_s=config.resync_s
    )


if __name__ == "__main__":
    sys.exit(main())
