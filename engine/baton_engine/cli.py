"""`baton-engine`: runs one engine process, configured by a file and flags."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from baton_engine.metrics.prometheus import engine_registry
from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
from baton_engine.server.admin_server import AdminServer
from baton_engine.server.engine_core_proc import EngineCoreProc
from baton_protocol.options.config import EngineConfig, ParallelConfig, container_path, pod_ip
from baton_protocol.options.engine_options import OPTIONS, problems
from baton_protocol.options.option import add_flags, set_field
from baton_protocol.process.fatal import ConfigurationError, FlagParser, report_fatal

#: Executors whose workers read the same file system as this process.
LOCAL_EXECUTORS = ("auto", "uniproc", "multiproc", "external_launcher")

logger = logging.getLogger(__name__)


def parse_config(argv: list[str]) -> tuple[EngineConfig, argparse.Namespace]:
    """Return the configuration and the parsed arguments. Flags override fields of `--config FILE`.

    Raises:
        ConfigurationError: the file, a flag or a value is wrong. The message names the
            file, the flag or the field.
    """
    args = _parser().parse_args(argv)
    fields: dict[str, Any] = {}
    if args.config is not None:
        try:
            fields = msgspec.json.decode(
                container_path(str(args.config)).read_bytes(), type=dict[str, Any]
            )
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError("InvalidConfig", f"{args.config}: {error}") from error
    for option in OPTIONS:
        if (value := getattr(args, option.path)) is not None:
            set_field(fields, option.path, value)
    model = fields.get("model", {})
    if isinstance(model, dict) and not model.get("path"):
        wanted = (
            "--model: the folder of a checkpoint"
            if args.config is None
            else f"model.path in {args.config}, or --model"
        )
        raise ConfigurationError("InvalidConfig", f"no model is given; pass {wanted}")
    try:
        config = msgspec.convert(fields, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError("InvalidConfig", f"{args.config or 'flags'}: {error}") from error
    for path, problem in problems(config):
        raise ConfigurationError("InvalidConfig", f"{path} {problem}")
    return config, args


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="baton-engine",
        description=__doc__,
        epilog="The engine binds $POD_IP, or 127.0.0.1 if POD_IP is not set.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="an EngineConfig as JSON; flags override its fields",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="least severe messages that are logged",
    )
    add_flags(parser, OPTIONS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one engine until SIGTERM, and return the exit code of the process.

    Exit code 78 means that the engine cannot start until its configuration or model changes.
    """
    try:
        config, args = parse_config(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(
            level=args.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s [%(threadName)s] %(message)s",
            stream=sys.stderr,
        )
        _check_model(config)
        return _serve(config)
    except ConfigurationError as error:
        logging.shutdown()
        return report_fatal(error.reason, error)


def run() -> NoReturn:
    """Run `main` and the exit handlers, then end the process without finalizing the interpreter.

    A thread of torch may still be joining or closing a process group. The process would abort if
    such a thread returned from C++ code while the interpreter shuts down.
    """
    code = main()
    atexit._run_exitfuncs()  # flushes logs, removes temporary folders, ends torch's compile workers
    sys.stdout.flush()
    os._exit(code)


def _check_model(config: EngineConfig) -> None:
    """Check the checkpoint's configuration before torch is imported, because the import is slow.

    The check is skipped if workers may run on other hosts, and for a custom worker class.

    Raises:
        ModelNotFound, ModelInvalid: as in `load_checkpoint_config`.
    """
    parallel = config.parallel
    if (
        parallel.executor_class in LOCAL_EXECUTORS
        and parallel.worker_class == ParallelConfig().worker_class
    ):
        model = config.model
        load_checkpoint_config(
            container_path(model.path), model.runner, model.classifier_from_token
        )


def _serve(config: EngineConfig) -> int:
    host = pod_ip()
    try:
        proc = _make_proc(config, host)
    except zmq.ZMQError as error:
        logger.error("cannot bind the engine port %s:%d: %s", host, config.engine_port, error)
        return 1
    model_name = config.model.served_name or Path(config.model.path).name
    registry = engine_registry(proc.stats, proc.request_metrics, model_name, proc.commit_pauses)
    registry.register(proc.access.refusals)
    try:
        admin = AdminServer(host, config.http_port, proc, registry, proc.access)
    except OSError as error:
        logger.error("cannot bind the HTTP port %s:%d: %s", host, config.http_port, error)
        proc.io.close()
        return 1
    proc.install_signal_handlers()
    admin.start()
    logger.info(
        "instance %s listens on %s: engine port %d, http port %d",
        proc.instance_id,
        host,
        proc.io.port,
        admin.port,
    )
    try:
        return proc.run()
    finally:
        admin.close()


def _make_proc(config: EngineConfig, host: str) -> EngineCoreProc:
    """Create the engine core process. Raise zmq.ZMQError if a port cannot be bound."""
    if not config.parallel.enable_expert_parallel:
        return EngineCoreProc(config, host)
    # Imported only here, because it imports torch. The parent of worker processes needs no torch.
    from baton_engine.expert_parallel.dp_engine_core_proc import DPEngineCoreProc

    return DPEngineCoreProc(config, host)


if __name__ == "__main__":
    run()
