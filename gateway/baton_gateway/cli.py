"""`baton-gateway`: reads the configuration from a file and flags and runs the server.

An invalid configuration ends the process with exit code 78. The last line on stderr is then
`FATAL <Reason>: <message>`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from baton_gateway.routing.discovery import Discovery
from baton_gateway.routing.file_discovery import FileDiscovery
from baton_gateway.server import Gateway
from baton_protocol.arguments import MAX_PORT
from baton_protocol.config import DiscoveryConfig, GatewayConfig, container_path, pod_ip
from baton_protocol.options import set_field
from baton_protocol.service_key import ServiceKeyError
from baton_text.tokenizer import Tokenizer

EX_CONFIG = 78
#: Heartbeats in a row that an engine must miss before it counts as dead.
MIN_HEARTBEATS = 3

_FLAGS: dict[str, tuple[str, type, str]] = {
    "--model": ("model.path", str, "checkpoint folder with tokenizer.json"),
    "--served-model-name": (
        "model.served_name",
        str,
        "name clients use; default: the folder's name",
    ),
    "--discovery-file": ("discovery.file", str, "JSON file of engine endpoints"),
    "--discovery-namespace": ("discovery.namespace", str, "namespace of the LLMService"),
    "--discovery-service": ("discovery.service", str, "name of the LLMService whose pods to watch"),
    "--discovery-resync-s": ("discovery.resync_s", float, "full re-list of pods at this interval"),
    "--port": ("port", int, "HTTP port on $POD_IP; 0: any free one"),
    "--max-concurrent-requests": (
        "max_concurrent_requests",
        int,
        "sequences served at once; more get 429",
    ),
    "--prefill-threshold-tokens": (
        "prefill_threshold_tokens",
        int,
        "shorter prompts skip the prefill engines",
    ),
    "--heartbeat-interval-s": (
        "heartbeat_interval_s",
        float,
        "interval of heartbeats to engines",
    ),
    "--heartbeat-timeout-s": (
        "heartbeat_timeout_s",
        float,
        "an engine that sends nothing for this long counts as dead",
    ),
    "--queue-wait-s": (
        "queue_wait_s",
        float,
        "new requests wait this long for a decode engine, then get 503",
    ),
    "--resume-wait-s": (
        "resume_wait_s",
        float,
        "requests whose engine was lost wait this long for another",
    ),
    "--hold-s": (
        "hold_s",
        float,
        "requests wait this long for a service that is scaled to zero; 0: do not wait",
    ),
    "--max-held-requests": (
        "max_held_requests",
        int,
        "requests that wait for it at once; more get 503",
    ),
    "--request-timeout-s": ("request_timeout_s", float, "a request that takes longer fails"),
    "--api-keys-dir": (
        "access.api_keys_dir",
        str,
        "folder with one file per client that contains its API key",
    ),
    "--tls-dir": ("access.tls_dir", str, "folder with tls.crt and tls.key: serve HTTPS"),
    "--max-concurrent-per-client": (
        "access.max_concurrent_per_client",
        int,
        "sequences of one API key at once",
    ),
    "--max-prompt-tokens": ("access.max_prompt_tokens", int, "longer prompts are refused"),
    "--max-completion-tokens": (
        "access.max_completion_tokens",
        int,
        "requests for more tokens are refused, answers end there",
    ),
    "--service-key-file": ("service_key_file", str, "file with the engines' key"),
    "--drain-timeout-s": (
        "drain_timeout_s",
        float,
        "running requests may take this long to end after SIGTERM",
    ),
    "--drain-quiet-s": (
        "drain_quiet_s",
        float,
        "serve after SIGTERM until no request has arrived for this long",
    ),
}


class ConfigurationError(Exception):
    """An invalid configuration.

    Args:
        reason: one CamelCase word, used as a condition's reason.
        message: what is wrong and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway. Return the exit code."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        tokenizer = load_tokenizer(config)
        discovery = make_discovery(config.discovery)
        gateway = make_gateway(config, tokenizer, discovery)
    except ConfigurationError as error:
        print(f"FATAL {error.reason}: {error}", file=sys.stderr, flush=True)
        return EX_CONFIG
    asyncio.run(gateway.serve_until_signal(pod_ip()))
    return 0


def load_config(argv: Sequence[str]) -> GatewayConfig:
    """Read the configuration file and apply the flags to it. Raises ConfigurationError."""
    parser = _Parser(prog="baton-gateway", description="OpenAI HTTP in front of Baton's engines.")
    parser.add_argument("--config", metavar="FILE", help="GatewayConfig as JSON")
    for flag, (target, kind, text) in _FLAGS.items():
        parser.add_argument(flag, dest=target, type=kind, metavar=kind.__name__.upper(), help=text)
    arguments = vars(parser.parse_args(argv))
    content: dict[str, Any] = {}
    path = arguments.pop("config")
    if path is not None:
        try:
            content = msgspec.json.decode(container_path(path).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError("InvalidConfig", f"{path}: {error}") from error
    for target, value in arguments.items():
        if value is not None:
            set_field(content, target, value)
    content.setdefault("discovery", {})
    try:
        config = msgspec.convert(content, GatewayConfig)
    except msgspec.ValidationError as error:
        hint = "; set it in --config FILE or with --model" if "model" not in content else ""
        raise ConfigurationError("InvalidConfig", f"{error}{hint}") from error
    for name in ("max_concurrent_requests", "request_timeout_s", "heartbeat_interval_s"):
        if not getattr(config, name) > 0:  # true for NaN
            raise ConfigurationError(
                "InvalidConfig", f"{name} must be positive, got {getattr(config, name)}"
            )
    for name in (
        "queue_wait_s",
        "resume_wait_s",
        "hold_s",
        "max_held_requests",
        "drain_timeout_s",
        "drain_quiet_s",
    ):
        if not getattr(config, name) >= 0:
            raise ConfigurationError(
                "InvalidConfig", f"{name} must not be negative, got {getattr(config, name)}"
            )
    if not 0 <= config.port <= MAX_PORT:
        raise ConfigurationError(
            "InvalidConfig", f"port must be in [0, {MAX_PORT}], got {config.port}"
        )
    for name in ("max_concurrent_per_client", "max_prompt_tokens", "max_completion_tokens"):
        limit = getattr(config.access, name)
        if limit is not None and limit <= 0:
            raise ConfigurationError(
                "InvalidConfig", f"access.{name} must be positive, got {limit}"
            )
    if config.access.max_concurrent_per_client is not None and not config.access.api_keys_dir:
        raise ConfigurationError(
            "InvalidConfig",
            "access.max_concurrent_per_client needs access.api_keys_dir: keys identify clients",
        )
    if not config.heartbeat_timeout_s >= MIN_HEARTBEATS * config.heartbeat_interval_s:
        raise ConfigurationError(
            "InvalidConfig",
            f"heartbeat_timeout_s must be at least {MIN_HEARTBEATS} times heartbeat_interval_s, "
            f"got {config.heartbeat_timeout_s} and {config.heartbeat_interval_s}: otherwise one "
            "late heartbeat would disconnect an engine",
        )
    return config


def load_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Load the model's tokenizer.

    Raises:
        ConfigurationError: ModelNotFound or InvalidTokenizer.
    """
    folder: Path = container_path(config.model.path)
    if not folder.is_dir():
        raise ConfigurationError(
            "ModelNotFound",
            f"{config.model.path} does not exist: --model is the folder of a checkpoint on this "
            "machine; nothing is downloaded",
        )
    try:
        return Tokenizer.from_folder(folder)
    except FileNotFoundError as error:
        raise ConfigurationError("ModelNotFound", str(error)) from error
    except ValueError as error:
        raise ConfigurationError("InvalidTokenizer", str(error)) from error


def make_gateway(config: GatewayConfig, tokenizer: Tokenizer, discovery: Discovery) -> Gateway:
    """Build the gateway.

    Raises:
        ConfigurationError: InvalidAccess if API keys or the certificate cannot be read, or
            ServiceKeyInvalid.
    """
    try:
        return Gateway(config, tokenizer, discovery)
    except OSError as error:
        raise ConfigurationError("InvalidAccess", f"API keys or certificate: {error}") from error
    except ServiceKeyError as error:
        raise ConfigurationError("ServiceKeyInvalid", str(error)) from error


def make_discovery(config: DiscoveryConfig) -> Discovery:
    """Build the configured discovery.

    Raises:
        ConfigurationError: InvalidConfig unless exactly one of file and service is set.
    """
    if bool(config.file) == bool(config.service):
        raise ConfigurationError("InvalidConfig", "discovery: set exactly one of file and service")
    if config.file:
        return FileDiscovery(container_path(config.file))
    # A slow import that file discovery does not need.
    from baton_gateway.routing.kubernetes_discovery import KubernetesDiscovery

    return KubernetesDiscovery(
        config.namespace or "default", config.service, resync_s=config.resync_s
    )


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong flags as ConfigurationError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError("InvalidConfig", message)


if __name__ == "__main__":
    sys.exit(main())
