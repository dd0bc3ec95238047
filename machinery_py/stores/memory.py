"""Stores in this process: `memory://`, `eager` and `null`.

memory://name    shared by all Servers of the process that name it; memory:// belongs to one Server
eager            tasks run inside `send`, at once, in the caller's thread, without delays, as in Go
null             a result backend that keeps nothing, for fire and forget
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import msgspec

from machinery_py.backends.base import Verdict
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.brokers.base import WAITING, Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.config.urls import StoreUrl
from machinery_py.connections.forks import ForkLock
from machinery_py.errors import ConfigError
from machinery_py.limits.base import Admission, Entrant
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.memory import MemoryLock
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import MessageRows
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Submission
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.stores.rows import RowsFamily, RowsSession, RowsStore
from machinery_py.threads import INSIDE


class _Shared:
    """The stores behind one memory URL."""

    def __init__(self, options: FamilyOptions) -> None:
        self.options = options
        self.rows = MemoryRows(options.clock)
        self.broker = MemoryBroker(self.rows, lease=options.lease)
        self.backend = MemoryBackend(self.rows, expire_in=options.expire_in)
        self.lock = MemoryLock(self.rows)


_named: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()
_naming = ForkLock()


class MemoryFamily(RowsFamily):
    """Stores under one lock."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        name = StoreUrl.parse(url).name
        with _naming:
            shared = _named.get(name) if name else None
            if shared is not None:
                _check(url, shared.options, options)
            else:
                shared = _Shared(options)
                if name:
                    _named[name] = shared
        self._shared = shared
        self.rows: MessageRows = shared.rows

    def broker(self) -> MemoryBroker:
        return self._shared.broker

    def backend(self) -> MemoryBackend:
        return self._shared.backend

    def lock(self) -> MemoryLock:
        return self._shared.lock


def _check(url: str, first: FamilyOptions, options: FamilyOptions) -> None:
    """Raise ConfigError if the store works by other options than this Server would have it."""
    for name, there, here in (
        ("lease", first.lease, options.lease),
        ("results_expire_in", first.expire_in, options.expire_in),
        ("clock", first.clock, options.clock),
    ):
        if there is not here and there != here:
            raise ConfigError(
                f"{url}: {name} is {there!r} in the Server that opened this store first, and "
                f"{here!r} here (give both the same, or name another store)"
            )


class EagerStore(RowsStore):
    """A memory store that runs what is put into it before `submit` returns."""

    _drain: Callable[[], object] | None = None

    def attach(self, drain: Callable[[], object]) -> None:
        self._drain = drain

    def is_entered(self) -> bool:
        return self.broker.is_entered()  # a task that runs inside of `submit` may send

    def submit(self, submission: Submission) -> bool:
        messages = _at_once(submission.messages)
        done = super().submit(msgspec.structs.replace(submission, messages=messages))
        if messages:
            self._run()
        return done

    def _run(self) -> None:
        if self._drain is not None:
            depth, INSIDE.depth = INSIDE.depth, 0  # user code
            try:
                self._drain()
            finally:
                INSIDE.depth = depth

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return EagerSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        return super().fire(msgspec.structs.replace(firing, send=_at_once(firing.send)))


class EagerSession(RowsSession):
    """Retries and callbacks with an ETA are due at once."""

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        hurried = [
            msgspec.structs.replace(
                one, send=_at_once(one.send), eta=one.eta if one.reason == WAITING else None
            )
            if one.send or one.eta
            else one
            for one in settlements
        ]
        return super().settle(hurried, marks)


def _at_once(messages: Sequence[Message]) -> list[Message]:
    return [msgspec.structs.replace(message, eta=None) for message in messages]


class EagerLimits(RowsLimits):
    """Limits that hold nobody back: a call of the eager store is over before `send` returns."""

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        return [Admission()] * len(entrants)

    def enter(self, *_: object, **__: object) -> Admission:
        return Admission()


class EagerFamily(MemoryFamily):
    """The memory stores behind an EagerStore."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__("memory://", options)
        self.url = url

    def limits(self) -> EagerLimits:
        return EagerLimits(self.rows)

    def together(self) -> EagerStore:
        return EagerStore(self._shared.broker, self._shared.backend)


class NullFamily(Family):
    """A backend for fire and forget."""

    def backend(self) -> NullBackend:
        return NullBackend(self.options.clock)
