"""Transactions of user code that tasks are sent in: blocks of `server.transaction`.

A block belongs to the thread that opened it, in a coroutine to its asyncio task. A thread that was
started in it sends on its own. Only where Python hands on the context (`asyncio.to_thread`, a new
asyncio task, `send_async`), one that sends in a block of another is refused: it could not know
whether it is in time for the commit.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from machinery_py.errors import Unsupported
from machinery_py.stores.base import Store, Submission

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py

#: The innermost block of this context; `current` says whether it counts.
HERE: ContextVar[Block | None] = ContextVar("machinery_transaction", default=None)


class Block:
    """A block in which an application sends in a transaction.

    Args:
        app: the application.
        source: what has the connection; of the same one a block in a block is one with it.
        open_store: returns the store in the transaction as it is now.
    """

    def __init__(self, app: object, source: object, open_store: Callable[[], Store]) -> None:
        self.app = app
        self.source = source
        self.store = open_store
        self.outer: Block | None = HERE.get()
        self.is_open = True
        self._thread, self._task = threading.get_ident(), _asyncio_task()
        self._sent: set[str] = set()

    def submit(self, submission: Submission) -> None:
        """Submit, once: after an error the transaction is over."""
        self.store().submit(submission)
        self.note_sent([message.uuid for message in submission.messages])

    def note_sent(self, uuids: Iterable[str]) -> None:
        """Note tasks that are sent when the transaction commits."""
        self._sent.update(uuids)

    def check_wait(self, uuids: Iterable[str]) -> None:
        """Raise Unsupported if one of these tasks was sent here: nobody runs it meanwhile."""
        if not self._sent.isdisjoint(uuids):
            raise Unsupported(
                "get() in the server.transaction that sends the task: it runs after the commit "
                "(commit, and leave the block first)"
            )

    def check_place(self) -> None:
        """Raise Unsupported if this is another thread, or asyncio task, than the block's."""
        is_there = threading.get_ident() == self._thread
        if not is_there or (self._task is not None and self._task is not _asyncio_task()):
            raise Unsupported(
                "not sent: server.transaction belongs to the thread, or asyncio task, that opened "
                "it (send there; with an AsyncSession: in run_sync, and not send_async)"
            )


def current(app: object) -> Block | None:
    """Return the innermost open block of this application, which is entered here.

    Raises:
        Unsupported: it is entered elsewhere, and this thread or asyncio task has its context.
    """
    block = HERE.get()
    while block is not None and (block.app is not app or not block.is_open):
        block = block.outer
    if block is not None:
        block.check_place()
    return block


@contextlib.contextmanager
def entered(block: Block) -> Iterator[None]:
    """Send in the transaction of the block from now on."""
    token = HERE.set(block)
    try:
        yield
    finally:
        block.is_open = False
        HERE.reset(token)


def _asyncio_task() -> Any:
    asyncio = sys.modules.get("asyncio")
    if not hasattr(asyncio, "current_task"):
        return None  # another thread may import it at this moment
    assert asyncio is not None
    return None if asyncio._get_running_loop() is None else asyncio.current_task()
