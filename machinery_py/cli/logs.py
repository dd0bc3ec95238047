"""Logging of the command line. The library itself configures none.

Each record is one line on stderr; only a traceback takes more, and in the text format each line of it begins with "  | ", so that
none can be taken for a record. What is logged while a task runs knows the task: `task_uuid`, `task_name`, `attempt`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
from typing import Any, TextIO

from machinery_py.cli.output import clean, clean_lines
from machinery_py.tasks.context import RUNNING
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
    """The attributes of a record. `extra=` may name the task as well, and then wins; logging would refuse it otherwise."""

    def __contains__(self, key: object) -> bool:
        return key not in TASK_FIELDS and super().__contains__(key)


class TaskRecord(logging.LogRecord):
    """A record that knows the task it was made in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = RUNNING.get()
        if context is not None:
            self.__dict__ = _Fields(
                self.__dict__,
                task_uuid=context.uuid,
                task_name=context.name,
                attempt=context.attempt,
            )


class TextFormatter(logging.Formatter):
    """For people. `colours`: of the level, for a terminal."""

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
            task = " ".join(
                str(part)
                for part in (found["task_uuid"], name, f"#{attempt}" if attempt else "")
                if part
            )
            line += f"  [{clean(task)}]"
        rows = [line, *(f"  | {row}" for row in clean_lines(_trace(self, record)))]
        # What is no text is written out by clean(), and so gets longer than it was.
        return "\n".join(
            [cut(row, _LONGEST) for row in rows] if record.name.startswith("machinery_py") else rows
        )


class JSONFormatter(logging.Formatter):
    """For programs: one JSON object a line, with what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line: dict[str, Any] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.timezone.utc).isoformat(
                timespec="milliseconds"
            ),
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
    """For commands that end at once: their warnings are a line like their errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"machinery: {clean(record.getMessage())}"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = (
        [record.exc_text or formatter.formatException(record.exc_info)]
        if record.exc_info and record.exc_info[0]
        else []
    )
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(level: str, log_format: str) -> None:
    """Log to stderr from this level on, in "text" or "json". Called once, before the user's module is imported."""
    logging.setLogRecordFactory(TaskRecord)
    formatter = (
        JSONFormatter() if log_format == "json" else TextFormatter(colours=has_colours(sys.stderr))
    )
    _to_stderr(formatter, level.upper())


def configure_short() -> None:
    """Warnings and errors only, for commands that end at once."""
    _to_stderr(_ShortFormatter(), "WARNING")


def _to_stderr(formatter: logging.Formatter, level: str) -> None:
    root = logging.getLogger()
    for old in [one for one in root.handlers if getattr(one, "of_machinery", False)]:
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.of_machinery = True  # type: ignore[attr-defined]  # known again when main() is called twice, as in tests
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level)
