"""Limits of texts that are kept, sent, logged or shown. A longer text is cut and says so.

MAX_ERROR       an error: in a task's state, an OnError callback's argument, a dead letter, and in
                every exception of this library
MAX_TRACEBACK   a task's traceback
MAX_LINE        a line of our log, and of a traceback
MAX_QUOTED      a name or value that an error text repeats
"""

from __future__ import annotations

import logging
import math
import traceback as tb

MAX_ERROR = 8_192  # bytes of UTF-8, as the others
MAX_TRACEBACK = 65_536
MAX_LINE = 1_500  # a handler's own format adds time, level and name, and keeps below 2 KB
MAX_QUOTED = 80


def cut(text: str, limit: int) -> str:
    """Return the text if it has at most `limit` bytes, else its beginning and its length."""
    if len(text) <= limit // 4:
        return text
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return text
    note = f"… ({len(text):,} characters)"
    return encoded[: limit - len(note) - 2].decode("utf-8", "ignore") + note


def length(seconds: float) -> str:
    """Return a length of time for people: `4 ms`, `0.4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 0.1:
        return f"{max(1, round(seconds * 1000)) if seconds > 0 else 1} ms"
    if not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def printable(text: str) -> str:
    """The text with surrogates, which UTF-8 cannot encode, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def quoted(text: str) -> str:
    """Return the repr of a name or value for an error or a log, cut if it is long."""
    return repr(cut(text, MAX_QUOTED))


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error: long lines cut, of very many lines the middle left out."""
    try:
        text = "".join(tb.format_exception(error))
    except BaseException:  # user code in __str__ or a broken cause
        return ""
    if len(text) <= MAX_LINE // 4:
        return text
    text = "\n".join([cut(line, MAX_LINE) for line in text.split("\n")])
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_TRACEBACK:
        return text
    half = (MAX_TRACEBACK - 100) // 2
    first = encoded[:half].decode("utf-8", "ignore").rpartition("\n")[0]
    last = encoded[-half:].decode("utf-8", "ignore").partition("\n")[2]
    return f"{first}\n  … (of {len(encoded):,} bytes)\n{last}"


class _Shortener(logging.Filter):
    """Cuts the message of a record, and its traceback if that is too long."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a mistake in the call, or user code in __str__: the handler reports it
            return True
        short = cut(message, MAX_LINE)
        if short is not message:
            record.msg, record.args = short, None
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not record.exc_text:
            text = traceback_text(error)
            if "… (" in text:
                record.exc_text = text.rstrip("\n")
        return True


_SHORTENER = _Shortener()


def get_logger(name: str) -> logging.Logger:
    """Return a logger that logs no line of more than MAX_LINE bytes, whatever its handlers."""
    logger = logging.getLogger(name)
    logger.addFilter(_SHORTENER)
    return logger
