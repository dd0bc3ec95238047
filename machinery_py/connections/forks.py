"""Fork safety: a child has no lock that is held for ever, and no signal handler of ours.

A fork copies locks as they are, and of the threads only the one that forks. So a lock that another
thread held at that moment is never released in the child. A `ForkLock` guards what a child goes on
with; it is free there. Where that is not enough, the fork waits: for imports (`not_forking`) and
for the hooks of `at_fork`.

A signal handler that tells the worker to stop would do so from a child as well, and keep the child
from being ended. So a child has the default handlers in the place of those that `handle` has set.

Limits: what a ForkLock guards may be half changed in the child. It must be usable as it is, or be
recognised by its process id and made anew.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from machinery_py.threads import is_owner

FORK_PATIENCE = 30.0  # seconds that a fork waits for other threads


class ForkLock:
    """A lock that is free in a forked child. If `reentrant`, its holder may enter again."""

    __slots__ = ("__weakref__", "_held", "_is_reentrant")

    def __init__(self, *, reentrant: bool = False) -> None:
        self._is_reentrant = reentrant
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Replace the lock by a free one, in a child."""
        self._held = threading.RLock() if self._is_reentrant else threading.Lock()

    def is_mine(self) -> bool:
        """Return whether this thread holds it; only if it is reentrant."""
        return self._is_reentrant and is_owner(self._held)

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._held.release()


@contextmanager
def not_forking() -> Iterator[None]:
    """Keep other threads from forking during imports: a child would find module locks taken."""
    with _Gate.lock:
        yield


def at_fork(
    before: Callable[[], object], after: Callable[[], object], in_child: Callable[[], object]
) -> None:
    """Call these at each fork, `before` and `after` in the parent; from the next fork on."""
    _hooks.append(ForkHooks(before, after, in_child))


def handle(number: int, handler: Callable[[int, FrameType | None], object]) -> Any:
    """Handle a signal in this process alone; return the previous handler. For the main thread."""
    _handlers[number] = handler
    return signal.signal(number, handler)


class ForkHooks(NamedTuple):
    before: Callable[[], object]
    after: Callable[[], object]
    in_child: Callable[[], object]


class _Gate:
    """The lock of a thread that forks, or that must not be copied at this moment."""

    lock = threading.RLock()


class _Fork(threading.local):
    """The fork that this thread is making."""

    hooks: tuple[ForkHooks, ...] = ()
    mask: set[Any] | None = None  # signals that were blocked before


_fork = _Fork()
_hooks: list[ForkHooks] = []
_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()
_handlers: dict[int, Callable[[int, FrameType | None], object]] = {}


def _before_fork() -> None:
    _Gate.lock.acquire(timeout=FORK_PATIENCE)
    _fork.hooks = tuple(_hooks)  # not earlier: an import may have added one
    for hooks in reversed(_fork.hooks):
        hooks.before()
    if _handlers:
        # A signal to the child waits until its handler is the default one; ours would swallow it.
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handlers)


def _unblock() -> None:
    mask, _fork.mask = _fork.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    try:
        _unblock()
        for hooks in _fork.hooks:
            hooks.after()
    finally:
        with suppress(RuntimeError):  # it was not acquired in time
            _Gate.lock.release()


def _after_fork_in_child() -> None:
    _Gate.lock = threading.RLock()
    for lock in list(_locks):
        lock.renew()
    for number, handler in _handlers.items():
        if signal.getsignal(number) == handler:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    _handlers.clear()
    _unblock()
    for hooks in _fork.hooks:
        hooks.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
