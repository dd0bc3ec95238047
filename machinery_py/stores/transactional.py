"""Settlement where broker and backend are one store with transactions: a transaction per batch.

First, inside the transaction, the delivery is removed from our hold. If it was not there, the lease
is lost and nothing of the settlement is written. This one step serves as lease, acknowledgement and
fence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from machinery_py.backends.base import ALREADY, CONFLICT, FENCED, SETTLED, Verdict, outbox_of
from machinery_py.backends.transactional import TransactionalBackend
from machinery_py.brokers.base import Broker, Consumer, Delivery, Message, mark_of
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    change_by,
    change_in,
    change_of,
    disposal_of,
)

Transaction = Callable[[], contextlib.AbstractContextManager[object]]


class OneStore(Store):
    """A broker and a backend that share `transaction`; a thread inside it may enter it again."""

    def __init__(
        self, broker: Broker, backend: TransactionalBackend, transaction: Transaction
    ) -> None:
        self.broker = broker
        self.backend = backend
        self.states = backend
        self._transaction = transaction

    def submit(self, submission: Submission) -> bool:
        with self._transaction():
            if submission.riders:
                if not self.states.holds(submission.riders):
                    return False
                submission = msgspec.structs.replace(submission, token="")
            if submission.put(self.broker) and (
                submission.states or submission.groups or submission.riders
            ):
                # One change for all: a batch's states and groups are loaded and saved together.
                self.backend.apply([change_in(submission)])
            return True

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return OneSession(self, self.broker.consume(queues, worker=worker), self._transaction)

    def fire(self, firing: Firing) -> bool:
        with self._transaction():
            if self.backend.apply([change_of(firing)]) != [SETTLED]:
                return False
            if firing.send:
                self.broker.put(firing.send, token="")
            return True

    def tend(self) -> float:
        return min(self.broker.tend(), self.backend.tend())


class OneSession(Session):
    """A consumer of the one store."""

    def __init__(self, store: OneStore, consumer: Consumer, transaction: Transaction) -> None:
        self._store = store
        super().__init__(consumer)
        self._transaction = transaction
        self.receive = consumer.receive  # type: ignore[method-assign]  # nothing to add on the hot path

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        return self.consumer.receive(limit, timeout, order)

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        with self._transaction():
            if marks:
                self._write_marks(marks, self._store.backend)
            if any(one.riders for one in settlements):
                if len(settlements) > 1:  # each sees the records that the one before has written
                    return [verdict for one in settlements for verdict in self.settle([one])]
                if self._is_refused(settlements[0]):
                    return [CONFLICT]
            ours = self.consumer.dispose([disposal_of(settlement) for settlement in settlements])
            held = [settlement for settlement, mine in zip(settlements, ours, strict=True) if mine]
            applied = iter(
                self._store.backend.apply([change_by(settlement) for settlement in held])
            )
            verdicts: list[Verdict] = []
            send: list[Message] = []
            for settlement, mine in zip(settlements, ours, strict=True):
                verdict = next(applied) if mine else self._not_ours(settlement)
                if verdict is SETTLED:
                    send.extend(settlement.send)
                verdicts.append(verdict)
            if send:
                self._store.broker.put(send, token="")
            return verdicts

    def _is_refused(self, settlement: Settlement) -> bool:
        """Return whether its riders refuse it; if so, it is not to touch its delivery."""
        backend, change = self._store.states, change_by(settlement)
        return (
            self.consumer.holds([settlement.delivery]) == [True]
            and not backend.holds(change.riders)
            and backend.apply([change]) == [CONFLICT]  # it may be FENCED instead
        )

    def _not_ours(self, settlement: Settlement) -> Verdict:
        if not settlement.states:
            return FENCED
        marks = outbox_of(self._store.backend).settled_by([settlement.uuid])
        return ALREADY if marks == [mark_of(settlement.delivery)] else FENCED
