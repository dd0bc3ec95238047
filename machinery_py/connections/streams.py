"""Standard streams that are closed, or that nobody reads any more.

A command that prints what was asked for ends when its reader has gone. What serves goes on, and
writes into nothing from then on: a worker, the dashboard, the exporter, the relay.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress

OUT, ERR = 1, 2
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_closed() -> None:
    """Give the process the standard streams that it was started without.

    Else the next file or socket gets the number: a database, for instance, into which every print
    of C code would write.
    """
    for number, name, mode in ((0, "stdin", "r"), (OUT, "stdout", "w"), (ERR, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the end


def is_unread(number: int) -> bool:
    """Return whether whatever read this stream has gone, as in `… | head -1`."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(0))


def drop_unread() -> None:
    """Have what is written to an unread stream go into nothing: tasks print, too."""
    for number in (OUT, ERR):
        if is_unread(number):
            _drop(number)


def announce(text: str) -> None:
    """Print the text at once. It may get lost: what serves goes on without."""
    try:
        print(text, flush=True)
    except OSError:
        drop_unread()


def finish() -> None:
    """Write what is left in buffers; Python itself would end with an exit code of its own."""
    for stream, number in ((sys.stdout, OUT), (sys.stderr, ERR)):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: a task has closed it
            _drop(number)


def _drop(number: int) -> None:
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
