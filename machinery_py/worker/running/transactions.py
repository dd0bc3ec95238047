"""Ends of tasks with `transaction=True`: committed with what the task wrote and sent.

    begin ──► function ──► settlement, as the last step ──► commit ──► settler: it is ALREADY true
                  │                      │                     │
                  │ raised               │ not ours            │ refused, or nobody knows
                  ▼                      ▼                     ▼
              rolled back            rolled back           rolled back, or asked for

The task's thread settles and commits. The settler then settles the same once more: that finds it
true, and all that follows an end (the log, events, locks, groups) is as for any task.

Killed before the commit: the server rolls back, the message is still held, and goes back. Killed
after it: the message is gone with the commit. A reply of the commit that is lost: whether the
delivery is still held says what became of it. The look waits for the server's end of the
transaction, which has locked the message.

Others that were in the way (a deadlock, a serialisation failure, a lock that the settlement waits
for), or a connection that was lost before the commit, cost no try: the message waits a little and
runs again, up to REPEATS times.
"""

from __future__ import annotations

import datetime as dt
import random

from machinery_py.backends.base import SETTLED
from machinery_py.brokers.base import RACED, Fate
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.registry.outcomes import Failed, Outcome
from machinery_py.stores.base import Settlement, StoreTransaction
from machinery_py.tasks.states import State
from machinery_py.texts import get_logger
from machinery_py.transactions import Block
from machinery_py.worker.running.execution import Execution, settlement_of
from machinery_py.worker.running.failures import failed
from machinery_py.worker.running.hooks import failure_by

logger = get_logger(__name__)

REPEATS = 10  # runs of one try whose transaction was rolled back through no fault of the task
PAUSE = 0.02, 1.0  # seconds until the next of them, at first and at most


def begin(execution: Execution) -> Block | None:
    """Return the block of its transaction; None: it has got its end without."""
    try:
        app = execution.app
        execution.transaction = transaction = app.patiently(app.store.open_transaction)
    except Unsupported as error:
        execution.finish(failure_by(error, retryable=False))
        return None
    except MachineryError as error:  # the store is away
        logger.warning("no transaction for task %s: %s", execution.signature.uuid, error)
        execution.settle(execution.end_of_delivery(Fate.BACK))
        return None
    return Block(execution.app, transaction.own.connection, lambda: transaction.store)


def roll_back(execution: Execution, outcome: Outcome) -> bool:
    """Roll back what the task did. False: others were in the way, and it will run again."""
    transaction = execution.transaction
    assert transaction is not None
    error = execution.error
    raced = error is not None and isinstance(outcome, Failed) and transaction.own.is_raced(error)
    transaction.own.close()
    if raced and error is not None and _may_repeat(execution):
        _log_race(execution, error)
        execution.settle(_later(execution))
        return False
    return True


def commit(execution: Execution, outcome: Outcome) -> Outcome | None:
    """Commit the end of a task that has succeeded, and return its outcome.

    None: it will run again. The outcome is a failure if the server refuses the commit.
    """
    transaction, settlement, session = (
        execution.transaction,
        execution.settlement,
        execution.session,
    )
    assert transaction is not None and settlement is not None and session is not None
    own = transaction.own
    if settlement.states[0].state is not State.SUCCESS:
        return outcome  # what follows it cannot be sent
    unknown = False
    try:
        if transaction.settle(session, settlement) is SETTLED:
            unknown = True
            own.commit()
        return outcome  # else the settler will meet the same
    except Exception as error:
        raced = own.is_raced(error) or (isinstance(error, MachineryError) and error.blocked)
        unknown = unknown and own.is_unknown(error)
        own.close()
        if unknown and not _is_held(execution, transaction):
            return outcome
        if not ((raced or unknown) and _may_repeat(execution)):
            outcome = failed(execution, error)
            execution.amend(*settlement_of(execution, outcome))
            return outcome
        _log_race(execution, error)
        execution.amend(_later(execution))
        return None


def _may_repeat(execution: Execution) -> bool:
    return execution.delivery.races < REPEATS


def _later(execution: Execution) -> Settlement:
    """Return the end of a delivery that comes again after a pause, without others being ahead."""
    first, most = PAUSE
    pause = min(most, first * 2 ** min(execution.delivery.races, 20)) * random.uniform(0.5, 1.0)
    eta = execution.app.now() + dt.timedelta(seconds=pause)
    return execution.end_of_delivery(Fate.LATER, eta=eta, reason=RACED)


def _is_held(execution: Execution, transaction: StoreTransaction) -> bool:
    """Return whether the delivery is still ours; True also if nobody knows: then it goes back."""
    session, delivery = execution.session, execution.delivery
    assert session is not None
    try:
        return execution.app.patiently(lambda: transaction.is_held(session, delivery))
    except MachineryError as error:
        logger.debug("task %s: %s", execution.signature.uuid, error)
        return True


def _log_race(execution: Execution, error: Exception) -> None:
    uuid = execution.signature.uuid
    logger.info(
        "task %s is run again: its transaction was rolled back: %s",
        uuid,
        error,
        extra={"task_uuid": uuid},
    )
