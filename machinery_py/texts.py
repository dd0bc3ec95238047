"""How long a text may get that is kept, sent or logged: the one place that knows. What is longer is cut, and says so.

MAX_ERROR       an error: in a task's state, an OnError callback's argument, a dead letter, and in every exception of ours
MAX_TRACEBACK   a task's traceback
MAX_LINE        a line of our log, and of a traceback
"""

from __future__ import annotations

import logging
import traceback as tb

MAX_ERROR = 8_192  # bytes of UTF-8, as the others
MAX_TRACEBACK = 65_536
MAX_LINE = 1_500  # a handler's own format adds time, level and name, and keeps below 2 KB


def cut(text: str, limit: int) -> str:
    """The beginning of a text, with a note of how long it is; all of it if that has no more than `limit` bytes."""
    if len(text) <= limit // 4:
        return text
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return text
    note = f"… ({len(text):,} characters)"
    return encoded[: limit - len(note) - 2].decode("utf-8", "ignore") + note


def printable(text: str) -> str:
    """The text with surrogates, which UTF-8 cannot encode, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error: long lines cut, of very many the middle left out, the error at the end."""
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
    first, last = (
        encoded[:half].decode("utf-8", "ignore"),
        encoded[-half:].decode("utf-8", "ignore"),
    )
    return f"{first.rpartition(chr(10))[0]}\n  … (of {len(encoded):,} bytes)\n{last.partition(chr(10))[2]}"


class _Shortener(logging.Filter):
    """Cuts what a record says; its arguments, and a traceback that is short enough, stay as they are."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a mistake in the call, or user code in __str__: the handler tells of it
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
    """The logger of a module of ours, which logs no line of more than MAX_LINE bytes, whoever handles it."""
    logger = logging.getLogger(name)
    logger.addFilter(_SHORTENER)
    return logger
