"""Submissions made on top of a call of the same store, and carried out when that call is over.

A finaliser or a signal handler runs on top of whatever its thread does: also of a call that holds
the store's lock, or that others wait for. A second call would wait for the first one, which cannot
go on, or find its work half done. So another thread makes it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable

from machinery_py.errors import PublishRefused
from machinery_py.stores.base import Submission
from machinery_py.texts import get_logger

logger = get_logger(__name__)

FLUSH = 30.0  # seconds at most that the end of a program waits for what is left


class LateSubmissions:
    """A thread that submits, started with the first one. `put` may interrupt anything, also itself.

    Args:
        submit: called in the thread; it repeats what has failed, and raises when it gives up.
    """

    def __init__(self, submit: Callable[[Submission], object]) -> None:
        self._submit = submit
        # Its `put` may be entered again on the same thread, unlike that of queue.Queue.
        self._queue: queue.SimpleQueue[Submission | threading.Event] = queue.SimpleQueue()
        self._pid = 0  # of the process that has the thread
        _all.add(self)

    def put(self, submission: Submission) -> None:
        """Have it submitted as soon as this thread's call is over.

        Raises:
            PublishRefused: no thread can be started: the interpreter is ending.
        """
        if self._pid != os.getpid():
            thread = threading.Thread(target=self._work, name="machinery-late-sends", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise PublishRefused(
                    f"not sent: {error} (it interrupts another call of the store, and so needs a "
                    "thread of its own)"
                ) from error
            self._pid = os.getpid()
        self._queue.put(submission)

    def flush(self, timeout: float) -> None:
        """Wait until all that was put before is submitted, or has failed."""
        if self._pid == os.getpid():
            done = threading.Event()
            self._queue.put(done)
            if not done.wait(timeout):
                logger.error("some tasks, sent while their thread was in a store, are not sent yet")

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._submit(item)
            except Exception as error:  # the thread must live on for the others
                for message in item.messages:
                    logger.error(
                        "task %s (%s), sent while its thread was in a call of the store, is lost: "
                        "%s",
                        message.uuid,
                        message.name,
                        error,
                        extra={"task_uuid": message.uuid},
                    )


_all: weakref.WeakSet[LateSubmissions] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for one in list(_all):
        one.flush(FLUSH)
