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
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TextIO

from machinery_py.cli.output import clean, clean_lines
from machinery_py.texts import cut

TASK_FIELDS = ("task_uuid", "task_name", "attempt")

_TASKS = "machinery_py.tasks"  # the logger of worker/loops/task_log.py
PIPE_BLOCK = 4_000  # characters of one write: a pipe keeps up to 4,096 bytes together
LARGE_BLOCK = 1_000_000  # of one to a file: each may cost the interpreter's lock
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
        self._second = -1
        self._before = self._after = ""  # of a line of a task, in this second

    def lines(self, lines: Iterable[Any]) -> Iterator[str]:
        """Yield lines of worker/loops/task_log.py as `format` would, in a fifth of its time."""
        for line in lines:
            if line.level != logging.INFO:
                yield self.format(line.record())
                continue
            second, rest = divmod(round(line.at * 1e6), 1_000_000)  # as fromtimestamp() rounds
            if second != self._second:
                self._second = second
                when = dt.datetime.fromtimestamp(second).isoformat(sep=" ")
                self._before, self._after = f"{when}.", f" INFO    {_TASKS}: "
            text = line.text
            if not text.isprintable():
                text = clean(text)
            yield f"{self._before}{rest // 1000:03}{self._after}{text}"

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        level = f"{record.levelname:<7}"
        if self._colours and record.levelno in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelno]}m{level}\x1b[0m"
        line = f"{when} {level} {clean(record.name)}: {clean(record.getMessage())}"
        found = vars(record)
        if found.get("task_uuid") and record.name != _TASKS:
            name, attempt = found.get("task_name", ""), found.get("attempt", "")
            parts = (found["task_uuid"], name, f"#{attempt}" if attempt else "")
            line += f"  [{clean(' '.join(str(part) for part in parts if part))}]"
        rows = [line, *(f"  | {row}" for row in clean_lines(_trace(self, record)))]
        if record.name.startswith("machinery_py"):
            rows = [cut(row, _LONGEST) for row in rows]  # clean() makes escaped texts longer
        return "\n".join(rows)


class JSONFormatter(logging.Formatter):
    """Lines for programs: one JSON object each, with the fields of `extra`."""

    def lines(self, lines: Iterable[Any]) -> Iterator[str]:
        """Yield lines of worker/loops/task_log.py as `format` would."""
        return (self.format(line.record()) for line in lines)

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


class LinesHandler(logging.StreamHandler[TextIO]):
    """Writes what a worker says of its tasks as one text for many lines; else as its base."""

    of_machinery: bool = False  # whether the command line has added it

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._block = LARGE_BLOCK if _is_file(stream) else PIPE_BLOCK

    def write_lines(self, lines: Sequence[Any]) -> None:
        """Write lines of worker/loops/task_log.py; blocks of whole lines stay whole in a pipe."""
        formatter = self.formatter
        assert isinstance(formatter, TextFormatter | JSONFormatter | _ShortFormatter)
        try:
            block: list[str] = []
            size = 0
            with self.lock or nullcontext():
                for text in formatter.lines(lines):
                    size += len(text) + 1
                    if size > self._block and block:
                        self.stream.write("\n".join(block) + "\n")
                        block, size = [], len(text) + 1
                    block.append(text)
                self.stream.write("\n".join(block) + "\n")
                self.flush()
        except Exception:  # as in every handler: a log that fails must end nothing
            self.handleError(lines[0].record())


class _ShortFormatter(logging.Formatter):
    """Lines of commands that end at once: warnings look like errors."""

    def lines(self, lines: Iterable[Any]) -> Iterator[str]:
        """Yield lines of worker/loops/task_log.py: the app may run a worker of its own."""
        return (self.format(line.record()) for line in lines)

    def format(self, record: logging.LogRecord) -> str:
        return f"machinery: {clean(record.getMessage())}"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    trace = ""
    if record.exc_text:
        trace = record.exc_text
    elif record.exc_info and record.exc_info[0]:
        trace = formatter.formatException(record.exc_info)
    return "\n".join(filter(None, (trace, record.stack_info)))


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure(level: str, log_format: str) -> None:
    """Log to stderr from this level on ("" is INFO), in "text" or "json"; before the import."""
    logging.setLogRecordFactory(TaskRecord)
    text = TextFormatter(colours=_has_colours(sys.stderr))
    _to_stderr(JSONFormatter() if log_format == "json" else text, level.upper() or "INFO")


def set_level(level: str) -> None:
    """Log from this level on; "" is INFO. After `configure`."""
    logging.getLogger().setLevel(level.upper() or "INFO")


def configure_short() -> None:
    """Log warnings and errors only, for commands that end at once."""
    _to_stderr(_ShortFormatter(), "WARNING")


def _to_stderr(formatter: logging.Formatter, level: str) -> None:
    root = logging.getLogger()
    for old in [one for one in root.handlers if getattr(one, "of_machinery", False)]:
        root.removeHandler(old)
    handler = LinesHandler(sys.stderr)
    handler.of_machinery = True  # found if main() is called twice
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level)
