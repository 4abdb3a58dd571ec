"""Log formats that include the service that is being reconciled.

JSON lines also have the id of the topology operation that the reconcile has requested.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

from baton_operator.names import Key

#: The service that is being reconciled.
service: ContextVar[Key | None] = ContextVar("service", default=None)
#: Id of the topology operation that the reconcile has requested.
operation: ContextVar[str] = ContextVar("operation", default="")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"


def configure(log_format: str, level: str) -> None:
    """Configure logging to stderr for the whole process. `log_format` is `json` or `text`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs every event
        # This logger warns about kopf's own thread, and about optional APIs that are not installed.
        logging.getLogger("kopf._core.reactor").setLevel(logging.ERROR)


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON.

    Every line has the fields ts, level, logger and message. Optional fields are namespace, service,
    operation and exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if key := service.get():
            line |= {"namespace": key.namespace, "service": key.name}
        if operation.get():
            line["operation"] = operation.get()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats a log record as text, with the service in brackets before the message."""

    def format(self, record: logging.LogRecord) -> str:
        key = service.get()
        record.about = f"[{key}] " if key else ""
        return super().format(record)
