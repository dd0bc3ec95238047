"""Steps with `transaction=True`: what a step has written and its checkpoint are one commit.

    begin ──► function ──► checkpoint, if the delivery is ours ──► commit ──► the stored value
                 │                      │                            │
                 │ raised               │ not ours                   │ refused, or nobody knows
                 ▼                      ▼                            ▼
             rolled back           rolled back            rolled back, or the checkpoint is there

Killed before the commit: the server rolls back, and the next run makes the step again. Killed after
it: the next run reads the checkpoint. After a lost reply of the commit the checkpoint says what
became of it; the look waits for the server's end of the transaction, which has locked the message.

If others were in the way (a deadlock, a serialisation failure), or the connection was lost before
the commit, the function is called once more, up to REPEATS times.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping

from machinery_py.backends.base import FENCED, SETTLED
from machinery_py.errors import MachineryError
from machinery_py.tasks.checkpoints import Checkpoint
from machinery_py.tasks.context import STEP_CONNECTION
from machinery_py.texts import get_logger
from machinery_py.transactions import Block, entered
from machinery_py.worker.running.keeping import StoreKeeper
from machinery_py.worker.running.transactions import PAUSE, REPEATS

logger = get_logger(__name__)


class StepRaced(Exception):
    """A transaction was rolled back through no fault of its step, which is to be made again."""


class StepTransaction:
    """Transaction of one try of a step. Belongs to one thread; closing it rolls back.

    Args:
        tries: how often the step was tried before.

    Raises:
        Unsupported: the stores have no transactions.
    """

    def __init__(self, keeper: StoreKeeper, *, tries: int) -> None:
        self._keeper = keeper
        self._tries = tries
        self._execution = one = keeper.execution
        self._transaction = one.app.patiently(one.app.store.open_transaction)
        self._own = self._transaction.own
        one.step_transaction = self._transaction

    def close(self) -> None:
        self._own.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the task's connection be that of the transaction, and send in it."""
        block = Block(self._execution.app, self._own.connection, lambda: self._transaction.store)
        token = STEP_CONNECTION.set(self._own.connection)
        try:
            with entered(block):
                yield
        finally:
            STEP_CONNECTION.reset(token)

    def check_race(self, error: Exception) -> None:
        """Raise StepRaced if the step has raised this through no fault of its own."""
        blocked = isinstance(error, MachineryError) and error.blocked
        if self._tries < REPEATS and (blocked or self._own.is_raced(error)):
            self._again(error)

    def keep(self, new: Mapping[str, Checkpoint]) -> Mapping[str, Checkpoint]:
        """Keep new checkpoints and commit, as StepKeeper.keep; rolled back unless it returns {}.

        Raises:
            StepRaced: it was rolled back, and may be tried again.
            StepLost: the run has ended, or its delivery is another worker's.
            Exception: the server refuses the commit.
        """
        one, keeper = self._execution, self._keeper
        session = one.session
        assert session is not None
        if one.is_over or session.consumer.is_lost(one.delivery):
            raise keeper.lost(new)
        one.knows_kept = False  # until there is an answer
        is_committing = False
        try:
            verdict = self._transaction.keep(session, one.delivery, keeper.keeping(new))
            if verdict is SETTLED:
                is_committing = True
                self._own.commit()
                keeper.note_kept(len(new))
                return {}
        except Exception as error:
            if not (is_committing and self._own.is_unknown(error)):
                one.knows_kept = True
                self.check_race(error)
                raise
            return self._ask(new, error)
        if verdict is FENCED:
            raise keeper.lost(new)
        return keeper.stored()

    def _ask(self, new: Mapping[str, Checkpoint], error: Exception) -> Mapping[str, Checkpoint]:
        """Return the checkpoints that are there after a commit of which nobody knows."""
        one, keeper = self._execution, self._keeper
        session = one.session
        assert session is not None
        self._own.close()
        is_held = one.app.patiently(lambda: self._transaction.is_held(session, one.delivery))
        there = keeper.stored()
        if not new.keys().isdisjoint(there):
            one.kept_newly = True
            return there
        if not is_held:
            raise keeper.lost(new)
        if self._tries >= REPEATS:
            raise error
        self._again(error)
        return {}

    def _again(self, error: Exception) -> None:
        uuid = self._execution.signature.uuid
        logger.info(
            "a step of task %s is made again: its transaction was rolled back: %s",
            uuid,
            error,
            extra={"task_uuid": uuid},
        )
        self._own.close()
        first, most = PAUSE
        time.sleep(min(most, first * 2**self._tries) * random.uniform(0.5, 1.0))
        raise StepRaced from error
