"""Logging of the long-lived processes: one line per event, to stderr, which daemons point at their
log file.

Names and keys of files are user data: they are logged at DEBUG only. HSFS_LOG chooses the level.
Output never blocks an event loop for long and never fails it: a full disk loses lines.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Line(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING hsfs.fuse.session: message`."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{stamp}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        # A message of a foreign library may hold newlines: one event stays one line, but for
        # tracebacks, which are indented below it.
        text = super().format(record)
        return text.replace("\n", "\n    ")


class _LossyHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def handleError(self, record: logging.LogRecord) -> None:
        """A log that can't be written must not disturb what it describes."""


def set_up_logging(process: str, default: str = "info") -> None:
    """Send everything at HSFS_LOG's level (debug, info, warning, error) and above to stderr."""
    level = _LEVELS.get(os.environ.get("HSFS_LOG", default).lower(), logging.INFO)
    handler = _LossyHandler(sys.stderr)
    handler.setFormatter(
        _Line(f"%(asctime)s %(levelname)s {process}[{os.getpid()}] %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Chatty libraries speak at INFO of what is of no interest here, and may print headers.
    for name in ("botocore", "boto3", "urllib3", "aiohttp", "asyncio", "s3transfer"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _to_stdlib],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _to_stdlib(
    logger: Any,  # noqa: ANN401 - as structlog's processors are typed
    method: str,
    event: MutableMapping[str, Any],
) -> tuple[tuple[str], dict[str, Any]]:
    """`event key=value ...` as the arguments of a stdlib logger's method."""
    exc_info = event.pop("exc_info", None)
    words = [str(event.pop("event", ""))]
    words += [f"{key}={_value(value)}" for key, value in event.items()]
    # One argument only: a percent sign in it is then no format.
    return (" ".join(words),), {"exc_info": exc_info} if exc_info else {}


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text or " " in text or not text.isprintable() else text
