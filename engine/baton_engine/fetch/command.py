"""`baton-model fetch`: the init container of pods whose model lies on a hub or in an object store."""

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

from baton_engine.fetch import progress as progress_server
from baton_engine.fetch.download import Patience
from baton_engine.fetch.fetch import Order, fetch
from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.folder import Marker
from baton_protocol import arguments
from baton_protocol.config import container_path, pod_ip

logger = logging.getLogger(__name__)

EXIT_CONFIGURATION = 78
EXIT_TEMPORARY = 1


class Fetched(msgspec.Struct, frozen=True):
    """What the container leaves in its termination log."""

    revision: str


def main(argv: list[str] | None = None) -> NoReturn:
    """Ends the process: 0 when the folder is complete, 78 if only a change helps, 1 if the next start may."""
    parser = argparse.ArgumentParser(
        prog="baton-model", description="Model files for Baton's pods."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser(
        "fetch", help="a model's files from a hub or an object store into a folder"
    )
    sub.add_argument(
        "--uri",
        required=True,
        help="hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
    )
    sub.add_argument(
        "--to", required=True, help="folder to make; several processes may be given the same one"
    )
    sub.add_argument(
        "--only",
        choices=["all", "tokenizer"],
        default="all",
        help="tokenizer: what a gateway reads",
    )
    sub.add_argument("--max-bytes", type=int, help="refuse a model that is larger")
    sub.add_argument(
        "--http-port",
        type=arguments.port,
        help="answer GET /health with the progress there, on $POD_IP",
    )
    sub.add_argument("--termination-log", help="file that is told the revision")
    sub.add_argument(
        "--give-up-after",
        type=arguments.positive,
        default=Patience.give_up_after_s,
        metavar="SECONDS",
        help="without a new byte",
    )
    args = parser.parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM)
    )  # as process 1 of a container it has no default
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    progress = progress_server.Progress()
    progress.log_from_now_on()
    if args.http_port is not None:
        try:
            progress_server.serve(progress, pod_ip(), args.http_port)
        except OSError as error:  # then nobody sees the progress, but in the log
            logger.warning("cannot serve on port %d of %s: %s", args.http_port, pod_ip(), error)
    try:
        order = Order(args.uri, _output(args.to), args.only, args.max_bytes)
        marker = fetch(order, progress, Patience(give_up_after_s=args.give_up_after))
        logger.info(
            "%s holds %d files of %s at %s", args.to, len(marker.files), marker.uri, marker.revision
        )
        _leave_word(marker, args.termination_log)
    except FetchError as error:
        _end(
            EXIT_TEMPORARY if error.temporary else EXIT_CONFIGURATION,
            f"FATAL {error.reason}: {_line(error.message)}",
        )
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _end(
            EXIT_CONFIGURATION,
            f"FATAL {'NoSpace' if full else 'ModelCacheInvalid'}: {_line(str(error))}",
        )
    _end(0, "")


def _end(code: int, last_line: str) -> NoReturn:
    """At once: transfers that still run in other threads must not speak after the last line, nor hold up the end."""
    if last_line:
        print(last_line, file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


def _line(text: str) -> str:
    return " ".join(text.split())


def _output(path: str) -> Path:
    """Where a path of the container that need not exist yet lies on this machine."""
    given = Path(path)
    return container_path(str(given.parent)) / given.name


def _leave_word(marker: Marker, termination_log: str | None) -> None:
    if termination_log:
        _output(termination_log).write_bytes(msgspec.json.encode(Fetched(marker.revision)))


if __name__ == "__main__":
    main()
