"""A broker and a backend over the rows of one store: what belongs together is one step.

The step of a settlement takes the message by its receipt. If that is lost, nothing of it is
written. This one condition serves as lease, acknowledgement and fence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    CONFLICT,
    FENCED,
    SETTLED,
    Backend,
    Change,
    Keeping,
    Verdict,
)
from machinery_py.backends.rows import TASK, RowsBackend, keys_of
from machinery_py.brokers.base import Broker, Consumer, Delivery, Message, mark_of
from machinery_py.brokers.rows import RowsBroker, raise_full
from machinery_py.clock import micros
from machinery_py.config.urls import Role
from machinery_py.errors import Unsupported
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.contract import Conflict, Gone, NoRoom, OwnTransaction, Patience, Rows
from machinery_py.rows.draft import Draft, StepRows, carry_out, read
from machinery_py.rows.messages import MessageRows, MessageStep
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    StoreTransaction,
    Submission,
    change_by,
    change_in,
    change_of,
)
from machinery_py.stores.open import Family
from machinery_py.threads import INSIDE


class RowsFamily(Family):
    """All stores over the rows of a URL, which `__init__` of a subclass opens.

    Attributes:
        rows: their clock is that of the family.
        broker_type, backend_type: with `features` that name the store.
    """

    keeps_time = True
    roles: ClassVar[Iterable[Role]] = ("broker", "result backend", "lock")
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
        self._broker = broker
        self.broker: Broker = broker
        self._backend = backend
        self.backend: Backend = backend
        self.rows: MessageRows = broker.rows

    def is_entered(self) -> bool:
        return INSIDE.depth > 0 or self.rows.is_entered()

    def submit(self, submission: Submission) -> bool:
        change, riders = change_in(submission), submission.riders

        def plan(draft: Draft) -> bool:
            if self._backend.plan(change, draft) is CONFLICT:
                return False
            self._check_draft(draft)
            self._broker.plan_put(
                submission.messages,
                draft,
                limits=submission.limits,
                token="" if riders else submission.token,
            )
            return True

        self._name_queues(submission.messages)
        new = not submission.replay and not [one for one in riders if one.expected is not None]
        accepted, done = carry_out(self.rows, keys_of(change), plan, new=new)
        if type(done) is NoRoom:
            raise_full(submission.limits, done)
        return accepted

    def _check_draft(self, draft: Draft) -> None:
        """Raise Unsupported if what is sent must not change these rows."""

    def within(self, connection: object) -> Store:
        return _Within(self, self.rows.on(connection))

    def open_transaction(self) -> StoreTransaction:
        return _Transaction(self, self.rows.open_transaction())

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


class _Within(RowsStore):
    """The same store in a transaction. New queues are named outside: others name them, too."""

    def __init__(self, store: RowsStore, rows: Rows) -> None:
        backend = copy.copy(store._backend)
        # It has what reading claims and states needs, and planning.
        backend.rows = cast(MessageRows, rows)
        super().__init__(store._broker, backend)
        self.rows = backend.rows

    def submit(self, submission: Submission) -> bool:
        self._broker.check_limits(submission.limits)
        return super().submit(msgspec.structs.replace(submission, limits=()))

    def _check_draft(self, draft: Draft) -> None:
        for key in draft.write:
            if key.kind == TASK and draft.found[key] is not None:
                raise Unsupported(
                    f"task {key.id} is there already, and cannot be sent in your transaction: its "
                    "worker would wait for its end (send it after the commit, or with a new UUID)"
                )


class _Transaction(StoreTransaction):
    """A transaction of the rows."""

    def __init__(self, store: RowsStore, own: OwnTransaction) -> None:
        self.own = own
        self.store = self._within = _Within(store, own.rows)
        self._broker = store._broker

    def settle(self, session: Session, settlement: Settlement) -> Verdict:
        assert isinstance(session, RowsSession)
        self._within._name_queues(settlement.send)
        return session.settle_on(self._within.rows, settlement)

    def keep(self, session: Session, delivery: Delivery, keeping: Keeping) -> Verdict:
        assert isinstance(session, RowsSession)
        return session.keep_on(self._within.rows, delivery, keeping)

    def is_held(self, session: Session, delivery: Delivery) -> bool:
        step = MessageStep()
        self._broker.plan_hold(delivery, session.consumer.session, step)
        # It locks the message, as the transaction has done.
        return self._broker.rows.commit([step]) != [Gone()]


class RowsSession(Session):
    """A consumer of the rows."""

    def __init__(self, store: RowsStore, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._store = store

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deliveries = self.consumer.receive(limit, timeout, order)
        self.none_revoked: bool = self.consumer.none_revoked
        return deliveries

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        return self.keep_on(self._store.rows, delivery, keeping)

    def keep_on(self, rows: StepRows, delivery: Delivery, keeping: Keeping) -> Verdict:
        """Keep checkpoints as a step of these rows, which may be in a transaction."""
        step = MessageStep()
        self._store._backend.plan_checkpoints(keeping, step)
        self._store._broker.plan_hold(delivery, self.consumer.session, step)
        [done] = rows.commit([step])
        if type(done) is Gone:
            return FENCED
        return CONFLICT if type(done) is Conflict else SETTLED

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        for one in settlements:
            if one.send:
                self._store._name_queues(one.send)
        plans = [_Plan(mark.delivery, change_of_mark(mark), None) for mark in marks]
        plans += [_Plan(one.delivery, change_by(one), one) for one in settlements]
        self._carry_out(plans, self._store.rows, self._store.rows.together)
        return [plan.verdict for plan in plans[len(marks) :]]

    def settle_on(self, rows: StepRows, settlement: Settlement) -> Verdict:
        """Settle as a step of these rows, which are in a transaction."""
        plan = _Plan(settlement.delivery, change_by(settlement), settlement)
        self._carry_out([plan], rows, nullcontext)
        return plan.verdict

    def _carry_out(
        self,
        plans: Sequence[_Plan],
        rows: StepRows,
        together: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Carry out each as a step, all together; those whose rows have changed once more."""
        patience = Patience()
        left = plans
        while left:
            read_at = micros(rows.clock.now())
            with together():
                found = read(rows, [key for plan in left for key in keys_of(plan.change)])
                drafts = [self._draft(plan, Draft(found=found, read_at=read_at)) for plan in left]
                results = rows.commit(drafts)
            again: list[_Plan] = []
            for plan, done in zip(left, results, strict=True):
                if type(done) is Conflict:  # isinstance has to ask the metaclass of structs
                    again.append(plan)
                elif type(done) is Gone:
                    plan.verdict = self._not_ours(plan)
            if again and len(again) == len(left):
                patience.wait()
            left = again

    def _draft(self, plan: _Plan, draft: Draft) -> Draft:
        """Return the step of a plan, and note its verdict if the delivery is ours."""
        store, session, settlement = self._store, self.consumer.session, plan.settlement
        plan.verdict = verdict = store._backend.plan(plan.change, draft)
        if settlement is None or verdict is CONFLICT:
            store._broker.plan_hold(plan.delivery, session, draft)
            return draft
        store._broker.plan_end(settlement, plan.delivery, session, draft)
        if settlement.send and verdict is SETTLED:
            store._broker.plan_put(settlement.send, draft)
        return draft

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
