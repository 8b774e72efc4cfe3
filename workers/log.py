"""Log lines of every process, written to standard error as text or as JSON.

Each line carries the name of its process. Fields given to a logger as `extra` (request_id, the figures of a rank's
stats line) become members of a JSON line; a text line shows the request's id.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

OURS = ("cluster", "workers", "kernels")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(
    process: str,
    level: LogLevel,
    log_format: LogFormat,
    *,
    rank: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Write this process's log lines to `stream`; of other libraries only warnings and errors.

    process   name of the process in each line, such as "rank 0"
    """
    handler = logging.StreamHandler(stream or sys.__stderr__)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process, rank))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields given as `extra`."""
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and not key.startswith("_")
    }


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00.123 WARNING rank 0: message [request_id]"""

    def __init__(self, process: str, rank: int | None = None):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`."""
        moment = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        head = f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {self._process}: "
        request_id = getattr(record, "request_id", None)
        line = f"{head}{record.getMessage()}" + (f" [{request_id}]" if request_id else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, rank, logger, message, exception, and the `extra` fields."""

    def __init__(self, process: str, rank: int | None = None):
        super().__init__()
        self._process = process
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of `record`."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
        }
        if self._rank is not None:
            fields["rank"] = self._rank
        fields |= {"logger": record.name, "message": record.getMessage(), **extra_fields(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
