"""Logging of the command line. The library itself configures no logging.

Each record is one line on stderr; only a traceback takes more, and in the text format each line of
it begins with "  | ", so that none can be taken for a record. A record that is made while a task
runs has its `task_uuid`, `task_name` and `attempt`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
from typing import Any, TextIO

from machinery_py.cli.output import clean, clean_lines
from machinery_py.texts import cut

TASK_FIELDS = ("task_uuid", "task_name", "attempt")

_LONGEST = 2_000  # bytes of one line of the library's own log, in text

_COLOURS = {
    logging.DEBUG: "2",
    logging.WARNING: "33",
    logging.ERROR: "31",
    logging.CRITICAL: "1;31",
}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Fields(dict[str, Any]):
    """The attributes of a record; `extra=` may overwrite the task's, which logging would refuse."""

    def __contains__(self, key: object) -> bool:
        return key not in TASK_FIELDS and super().__contains__(key)


class TaskRecord(logging.LogRecord):
    """A record that knows the task it was made in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not imported: a supervisor runs no task, and is to be small.
        running = sys.modules.get("machinery_py.tasks.context")
        context = running.RUNNING.get() if running is not None else None
        if context is not None:
            self.__dict__ = _Fields(
                self.__dict__,
                task_uuid=context.uuid,
                task_name=context.name,
                attempt=context.attempt,
            )


class TextFormatter(logging.Formatter):
    """Lines for people. `colours`: colour the level, for a terminal."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        level = f"{record.levelname:<7}"
        if self._colours and record.levelno in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelno]}m{level}\x1b[0m"
        line = f"{when} {level} {clean(record.name)}: {clean(record.getMessage())}"
        found = vars(record)
        if found.get("task_uuid"):
            name, attempt = found.get("task_name", ""), found.get("attempt", "")
            parts = (found["task_uuid"], name, f"#{attempt}" if attempt else "")
            line += f"  [{clean(' '.join(str(part) for part in parts if part))}]"
        rows = [line, *(f"  | {row}" for row in clean_lines(_trace(self, record)))]
        if record.name.startswith("machinery_py"):
            rows = [cut(row, _LONGEST) for row in rows]  # clean() makes escaped texts longer
        return "\n".join(rows)


class JSONFormatter(logging.Formatter):
    """Lines for programs: one JSON object each, with the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        time = dt.datetime.fromtimestamp(record.created, dt.timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := _trace(self, record):
            line["exception"] = trace
        try:
            return json.dumps({**extra, **line}, default=str, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return json.dumps({**{str(name): repr(value) for name, value in extra.items()}, **line})


class _ShortFormatter(logging.Formatter):
    """Lines of commands that end at once: warnings look like errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"machinery: {clean(record.getMessage())}"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    trace = ""
    if record.exc_info and record.exc_info[0]:
        trace = record.exc_text or formatter.formatException(record.exc_info)
    return "\n".join(filter(None, (trace, record.stack_info)))


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(level: str, log_format: str) -> None:
    """Log to stderr from this level on, in "text" or "json"; before the app is imported."""
    logging.setLogRecordFactory(TaskRecord)
    text = TextFormatter(colours=_has_colours(sys.stderr))
    _to_stderr(JSONFormatter() if log_format == "json" else text, level.upper())


def configure_short() -> None:
    """Log warnings and errors only, for commands that end at once."""
    _to_stderr(_ShortFormatter(), "WARNING")


def _to_stderr(formatter: logging.Formatter, level: str) -> None:
    root = logging.getLogger()
    for old in [one for one in root.handlers if getattr(one, "of_machinery", False)]:
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.of_machinery = True  # type: ignore[attr-defined]  # found if main() is called twice
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level)
