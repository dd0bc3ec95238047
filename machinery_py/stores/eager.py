"""`eager`: tasks run inside `send`, in the caller's thread, at once; delays are not waited for. As in Go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from machinery_py.backends.base import Amendment, Verdict
from machinery_py.brokers.base import WAITING, Message
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Submission
from machinery_py.stores.family import FamilyOptions
from machinery_py.stores.memory import MemoryFamily
from machinery_py.stores.transactional import OneSession, OneStore


class EagerStore(OneStore):
    """A memory store that runs what is put into it before `submit` returns."""

    _drain: Callable[[], object] | None = None

    def attach(self, drain: Callable[[], object]) -> None:
        self._drain = drain

    def submit(self, submission: Submission) -> None:
        super().submit(msgspec.structs.replace(submission, messages=_at_once(submission.messages)))
        if self._drain is not None:
            self._drain()

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        amended = super().amend(amendment, _at_once(send))
        if send and self._drain is not None:
            self._drain()
        return amended

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return EagerSession(self, self.broker.consume(queues, worker=worker), self._transaction)

    def fire(self, firing: Firing) -> bool:
        return super().fire(msgspec.structs.replace(firing, send=_at_once(firing.send)))


class EagerSession(OneSession):
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


class EagerFamily(MemoryFamily):
    """The memory stores behind an EagerStore."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__("memory://", options)
        self.url = url

    def together(self) -> EagerStore:
        return EagerStore(self._shared.broker, self._shared.backend, self._shared.hub.transaction)
