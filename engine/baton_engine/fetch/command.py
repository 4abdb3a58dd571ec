"""The command `baton-model fetch`, which downloads a pod's model in an init container."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from baton_engine.fetch import fetch_progress as progress_server
from baton_engine.fetch.download import RetryPolicy
from baton_engine.fetch.fetch import FetchRequest, fetch
from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.folder import Marker
from baton_protocol.options import arguments
from baton_protocol.options.config import container_path, pod_ip
from baton_protocol.process.fatal import report_fatal

logger = logging.getLogger(__name__)


class Fetched(msgspec.Struct, frozen=True):
    """The JSON object that a successful fetch writes to the container's termination log."""

    revision: str


def main(argv: list[str] | None = None) -> NoReturn:
    """Fetch the model and exit.

    The exit code is 0 if the folder is complete, 78 if the configuration must change, and 1 if a
    restart may succeed.
    """
    args = _parser().parse_args(argv)
    # Process 1 of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    progress = progress_server.FetchProgress()
    progress.start_logging()
    if args.http_port is not None:
        try:
            progress_server.serve(progress, pod_ip(), args.http_port)
        except OSError as error:
            logger.warning(
                "the progress cannot be served on port %d of %s: %s; only this log shows it",
                args.http_port,
                pod_ip(),
                error,
            )
    try:
        request = FetchRequest(args.uri, _output(args.to), args.only, args.max_bytes)
        marker = fetch(request, progress, RetryPolicy(give_up_after_s=args.give_up_after))
        logger.info(
            "the folder %s holds %d files of %s at revision %s",
            args.to,
            len(marker.files),
            marker.uri,
            marker.revision,
        )
        _write_termination_log(marker, args.termination_log)
    except FetchError as error:
        code = report_fatal(error.reason, error.message)
        _exit(1 if error.temporary else code)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _exit(report_fatal("NoSpace" if full else "ModelCacheInvalid", error))
    _exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton-model", description="Model files for Baton's pods."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser(
        "fetch", help="download a model's files from a hub or an object store into a folder"
    )
    sub.add_argument(
        "--uri",
        required=True,
        help="hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
    )
    sub.add_argument(
        "--to", required=True, help="folder to create; several processes may share one"
    )
    sub.add_argument(
        "--only",
        choices=["all", "tokenizer"],
        default="all",
        help="tokenizer: only the files that a gateway reads",
    )
    sub.add_argument("--max-bytes", type=int, help="refuse a model that is larger")
    sub.add_argument(
        "--http-port",
        type=arguments.port,
        help="serve GET /health with the progress on this port of $POD_IP",
    )
    sub.add_argument("--termination-log", help="file to write the revision to")
    sub.add_argument(
        "--give-up-after",
        type=arguments.positive,
        default=RetryPolicy.give_up_after_s,
        metavar="SECONDS",
        help="exit after this time without a new byte",
    )
    return parser


def _exit(code: int) -> NoReturn:
    """End the process without waiting for other threads.

    Threads that still download must not write to the log after the line
    `FATAL <reason>: <message>`.
    """
    os._exit(code)


def _output(path: str) -> Path:
    """Translate an output file's path in the container to a path that this process can open.

    The file need not exist yet.
    """
    given = Path(path)
    return container_path(str(given.parent)) / given.name


def _write_termination_log(marker: Marker, termination_log: str | None) -> None:
    if termination_log:
        _output(termination_log).write_bytes(msgspec.json.encode(Fetched(marker.revision)))


if __name__ == "__main__":
    main()
