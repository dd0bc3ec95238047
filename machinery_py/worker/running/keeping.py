"""Keeping checkpoints in the store of a task's delivery: what the steps of a run need of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from machinery_py.backends.base import FENCED, SETTLED, Keeping, Verdict
from machinery_py.brokers.base import Fate
from machinery_py.clock import micros
from machinery_py.errors import MachineryError, StepLost, Unsupported, for_good
from machinery_py.tasks.checkpoints import (
    Checkpoint,
    encode,
    generation_of,
    kept_of,
    of_generation,
    stored_name,
)
from machinery_py.tasks.states import FINISHED
from machinery_py.texts import get_logger
from machinery_py.worker.running.execution import Execution

logger = get_logger(__name__)

LETTER_LIFE = 365 * 86400.0  # seconds that the checkpoints of a dead letter are kept
MARGIN = 60.0  # seconds that they outlive the state of their task


class StepKeeper(Protocol):
    """Keeper of one run's checkpoints; in a task process it asks the worker."""

    def read(self) -> dict[str, Checkpoint]:
        """Return those that there are, by the names of their steps.

        Raises:
            Unsupported: these stores keep none.
        """
        ...

    def keep(self, new: Mapping[str, Checkpoint]) -> Mapping[str, Checkpoint]:
        """Keep new ones, all or none.

        Returns those that were there before; then nothing was written.

        Raises:
            StepLost: the run has ended, or its delivery is another worker's.
        """
        ...


class StoreKeeper:
    """Keeper of an execution's checkpoints in its store."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        refuse(execution)

    def read(self) -> dict[str, Checkpoint]:
        """As StepKeeper; of the first run of a first delivery there are none, and none is read."""
        one = self._execution
        if one.delivery.count > 1 or kept_of(one.signature) is not None:
            return self._read()
        return {}

    def _read(self) -> dict[str, Checkpoint]:
        one = self._execution
        backend, uuid = one.app.store.backend, one.signature.uuid
        one.app.patiently(lambda: backend.fence_checkpoints(uuid, one.delivery.fence))
        found = one.app.patiently(lambda: kept_in_store(one))
        one.kept = max(one.kept, len(found))
        return found

    def keep(self, new: Mapping[str, Checkpoint]) -> Mapping[str, Checkpoint]:
        one = self._execution
        signature, at = one.signature, micros(one.app.now())
        generation = generation_of(signature)
        rows = {
            stored_name(generation, name): encode(
                msgspec.structs.replace(row, at=at, run=signature.run, strikes=one.strikes)
            )
            for name, row in new.items()
        }
        keeping, session = Keeping(uuid=signature.uuid, rows=rows), one.session
        assert session is not None
        while not (one.is_over or session.consumer.is_lost(one.delivery)):
            verdict = one.app.patiently(lambda: session.keep(one.delivery, keeping))
            if verdict is SETTLED:
                one.kept, one.kept_newly = one.kept + len(new), True
                return {}
            if verdict is FENCED or not session.consumer.holds([one.delivery])[0]:
                break
            there = self._read()
            if found := {name: there[name] for name in new if name in there}:
                return found
        raise StepLost(
            f"task {signature.name} {signature.uuid}: this run is not the task's any more, and "
            f"step {', '.join(map(repr, new))} is not kept (its lease was lost, or it is over)"
        )


def refuse(execution: Execution) -> None:
    """Raise Unsupported if a task like this cannot have steps on these stores."""
    settings, backend = execution.settings, execution.app.store.backend
    why = ""
    if settings.batch:
        why = f"batch={settings.batch} (its calls have no runs of their own)"
    elif execution.runs_once:
        what = "ack" if settings.ack == "early" else "on_worker_lost"
        why = f"{what}={getattr(settings, what)!r} (it is never run again)"
    elif settings.transaction:
        why = "transaction=True (all that it writes becomes true at once, or not at all)"
    if why:
        raise for_good(Unsupported(f"{execution.signature.name} cannot have steps: {why}"))
    if not backend.features.checkpoints:
        try:
            backend.checkpoints(execution.signature.uuid)
        except Unsupported as error:
            raise for_good(error) from None


def kept_in_store(execution: Execution) -> dict[str, Checkpoint]:
    """Return the checkpoints of the task that are stored."""
    signature = execution.signature
    rows = execution.app.store.backend.checkpoints(signature.uuid)
    return of_generation(rows, generation_of(signature))


def has_kept(execution: Execution) -> bool:
    """Return whether the task has kept a checkpoint. Asks the store for a redelivery alone."""
    if kept_of(execution.signature) is not None:
        return True
    if execution.delivery.count == 1 or not execution.app.store.backend.features.checkpoints:
        return False
    return bool(kept_in_store(execution))


def strikes_since(execution: Execution) -> int:
    """Return the strikes of the task since it has last kept a checkpoint."""
    if not execution.app.store.backend.features.checkpoints:
        return execution.strikes
    kept = kept_in_store(execution).values()
    run = execution.signature.run
    return execution.strikes - max((one.strikes for one in kept if one.run == run), default=0)


def end_checkpoints(execution: Execution, verdict: Verdict) -> None:
    """Let checkpoints go with the task's state, or stay with its dead letter, if it has ended.

    A failure does no harm: they stay longer.
    """
    settlement, backend = execution.settlement, execution.app.store.backend
    if settlement is None or verdict is FENCED or not backend.features.checkpoints:
        return
    state = settlement.states[0] if settlement.states else None
    if state is None or state.state not in FINISHED:
        return
    if execution.context is not None and not (execution.kept or kept_of(execution.signature)):
        return  # it has run to its end, and made no step
    life = LETTER_LIFE
    if settlement.fate is not Fate.DEAD:
        life = state.life(execution.app.config.results_expire_in) + MARGIN
    try:
        backend.end_checkpoints(settlement.uuid, life)
    except MachineryError as error:
        logger.debug("checkpoints of task %s stay for now: %s", settlement.uuid, error)
