"""A broker and a backend over the rows of one store: what belongs together is one step.

The step of a settlement takes the message by its receipt. If that is lost, nothing of it is
written. This one condition serves as lease, acknowledgement and fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from machinery_py.backends.base import ALREADY, CONFLICT, FENCED, SETTLED, Change, Verdict
from machinery_py.backends.rows import RowsBackend, keys_of
from machinery_py.brokers.base import Consumer, Delivery, Message, mark_of
from machinery_py.brokers.rows import RowsBroker, raise_full
from machinery_py.clock import micros
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.contract import Conflict, Gone, NoRoom, Patience
from machinery_py.rows.draft import Draft, carry_out, read
from machinery_py.rows.messages import MessageRows
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
)
from machinery_py.stores.open import Family


class RowsFamily(Family):
    """All stores over the rows of a URL, which `__init__` of a subclass opens.

    Attributes:
        rows: their clock is that of the family.
        broker_type, backend_type: with `features` that name the store.
    """

    keeps_time = True
    roles = ("broker", "result backend", "lock")
    rows: MessageRows
    broker_type: ClassVar[type[RowsBroker]] = RowsBroker
    backend_type: ClassVar[type[RowsBackend]] = RowsBackend

    def broker(self) -> RowsBroker:
        return self.broker_type(self.rows, lease=self.options.lease)

    def backend(self) -> RowsBackend:
        return self.backend_type(self.rows, expire_in=self.options.expire_in)

    def lock(self) -> RowsLock:
        return RowsLock(self.rows)

    def limits(self) -> RowsLimits:
        return RowsLimits(self.rows)

    def together(self) -> RowsStore:
        return RowsStore(self.broker(), self.backend())


class RowsStore(Store):
    """A broker and a backend over the same rows."""

    def __init__(self, broker: RowsBroker, backend: RowsBackend) -> None:
        self.broker = self._broker = broker
        self.backend = self._backend = backend
        self.rows = broker.rows

    def submit(self, submission: Submission) -> bool:
        change, riders = change_in(submission), submission.riders

        def plan(draft: Draft) -> bool:
            if self._backend.plan(change, draft) is CONFLICT:
                return False
            self._broker.plan_put(
                submission.messages,
                draft,
                limits=submission.limits,
                token="" if riders else submission.token,
            )
            return True

        self._name_queues(submission.messages)
        new = not submission.replay and all(one.expected is None for one in riders)
        accepted, done = carry_out(self.rows, keys_of(change), plan, new=new)
        if isinstance(done, NoRoom):
            raise_full(submission.limits, done)
        return accepted

    def _name_queues(self, messages: Sequence[Message]) -> None:
        if messages:
            self._broker.name_queues([message.queue for message in messages])

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return RowsSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = change_of(firing)

        def plan(draft: Draft) -> bool:
            if self._backend.plan(change, draft) is not SETTLED:
                return False
            self._broker.plan_put(firing.send, draft)
            return True

        self._name_queues(firing.send)
        return carry_out(self.rows, keys_of(change), plan)[0]

    def tend(self) -> float:
        return min(self.broker.tend(), self.backend.tend())


class RowsSession(Session):
    """A consumer of the rows."""

    def __init__(self, store: RowsStore, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._store = store

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        return self.consumer.receive(limit, timeout, order)

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        for one in settlements:
            if one.send:
                self._store._name_queues(one.send)
        plans = [_Plan(mark.delivery, change_of_mark(mark), None) for mark in marks]
        plans += [_Plan(one.delivery, change_by(one), one) for one in settlements]
        self._carry_out(plans)
        return [plan.verdict for plan in plans[len(marks) :]]

    def _carry_out(self, plans: Sequence[_Plan]) -> None:
        """Carry out each as a step, all together; those whose rows have changed once more."""
        rows, patience = self._store.rows, Patience()
        left = plans
        while left:
            read_at = micros(rows.clock.now())
            with rows.together():
                found = read(rows, [key for plan in left for key in keys_of(plan.change)])
                steps = [Draft(found=found, read_at=read_at) for _ in left]
                for plan, step in zip(left, steps, strict=True):
                    self._draft(plan, step)
                results = rows.commit(steps)
            again: list[_Plan] = []
            for plan, done in zip(left, results, strict=True):
                if isinstance(done, Conflict):
                    again.append(plan)
                elif isinstance(done, Gone):
                    plan.verdict = self._not_ours(plan)
            if again and len(again) == len(left):
                patience.wait()
            left = again

    def _draft(self, plan: _Plan, draft: Draft) -> None:
        """Write the step of a plan, and note its verdict if the delivery is ours."""
        store, session = self._store, self.consumer.session
        settlement = plan.settlement
        plan.verdict = verdict = store._backend.plan(plan.change, draft)
        if settlement is None or verdict is CONFLICT:
            store._broker.plan_hold(plan.delivery, session, draft)
            return
        store._broker.plan_end(settlement, plan.delivery, session, draft)
        if settlement.send and verdict is SETTLED:
            store._broker.plan_put(settlement.send, draft)

    def _not_ours(self, plan: _Plan) -> Verdict:
        """Return the verdict of a plan whose delivery was not ours."""
        if plan.settlement is None or not plan.settlement.states:
            return FENCED
        marks = self._store._backend.settled_by([plan.settlement.uuid])
        return ALREADY if marks == [mark_of(plan.delivery)] else FENCED


class _Plan(msgspec.Struct, gc=False):
    """A settlement or a mark on its way."""

    delivery: Delivery
    change: Change
    settlement: Settlement | None
    verdict: Verdict = FENCED


def change_of_mark(mark: Mark) -> Change:
    """Return the change of a mark in the backend."""
    return Change(key=mark.state.task_uuid, states=(mark.state,))
