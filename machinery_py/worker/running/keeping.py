"""Keeping checkpoints in the store of a task's delivery: what the steps of a run need of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from machinery_py.backends.base import FENCED, SETTLED, Keeping, Verdict
from machinery_py.bounds import CHECKPOINT_LIFE
from machinery_py.brokers.base import Fate
from machinery_py.clock import micros
from machinery_py.errors import MachineryError, StepLost, StepRefused, Unsupported, for_good
from machinery_py.tasks.checkpoints import (
    Checkpoint,
    before_generation,
    encode,
    generation_of,
    kept_of,
    of_generation,
    stored_name,
)
from machinery_py.tasks.mailboxes import Received, Wanted, read_in
from machinery_py.tasks.states import FINISHED, SUCCESS
from machinery_py.texts import get_logger
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.waiting import begin_generation, end_mailbox, receive

logger = get_logger(__name__)

MOST_CONFLICTS = 5  # of one step; more: another one writes under its names
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

        Returns all that there are, if one of these is among them: then nothing was written.

        Raises:
            StepLost: the run has ended, or its delivery is another worker's.
        """
        ...

    def receive(self, wanted: Wanted) -> Received:
        """Return a signal, or let the task wait for it; then the run must end.

        Raises:
            StepLost: as `keep`.
            Unsupported: these stores keep no signals.
        """
        ...


class StoreKeeper:
    """Keeper of an execution's checkpoints in its store."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        refuse(execution)

    def read(self) -> dict[str, Checkpoint]:
        """As StepKeeper; of the first run of a first delivery there are none, and none is read.

        Raises:
            StepRefused: some are gone, of those that earlier runs have kept.
        """
        one = self.execution
        if not one.may_have_kept:
            return {}
        found, kept = self.stored(), kept_of(one.signature)
        if kept is not None and len(found) < kept.number:
            raise StepRefused(
                f"{len(found)} of {kept.number} checkpoints of task {one.signature.name} "
                f"{one.signature.uuid} are there, and it would make the steps of the others again "
                "(if that is wanted: machinery retry --from-start)"
            )
        return found

    def stored(self) -> dict[str, Checkpoint]:
        """Return those that are stored now."""
        one = self.execution
        backend, uuid = one.app.store.backend, one.signature.uuid
        one.app.patiently(lambda: backend.fence_checkpoints(uuid, one.delivery.fence))
        rows = one.app.patiently(lambda: backend.checkpoints(uuid))
        if old := before_generation(rows, generation_of(one.signature)):
            begin_generation(one, {name: rows[name] for name in old})
            one.app.patiently(lambda: backend.drop_checkpoints(uuid, old))
        found = of_generation(rows, generation_of(one.signature))
        one.kept, one.knows_kept = max(one.kept, len(found)), True
        one.has_mailbox = one.has_mailbox or bool(read_in(found, 0))
        return found

    def keep(self, new: Mapping[str, Checkpoint]) -> Mapping[str, Checkpoint]:
        one = self.execution
        keeping, session = self.keeping(new), one.session
        assert session is not None
        for _ in range(MOST_CONFLICTS):
            if one.is_over or session.consumer.is_lost(one.delivery):
                break
            one.knows_kept = False  # until there is an answer
            verdict = one.app.patiently(lambda: session.keep(one.delivery, keeping))
            if verdict is SETTLED:
                self.note_kept(len(new))
                return {}
            if verdict is FENCED or not session.consumer.holds([one.delivery])[0]:
                break
            there = self.stored()
            if not new.keys().isdisjoint(there):
                return there
        raise self.lost(new)

    # For transactions of steps as well

    def keeping(self, new: Mapping[str, Checkpoint]) -> Keeping:
        """Return what is to be stored."""
        one = self.execution
        signature, at = one.signature, micros(one.app.now())
        generation = generation_of(signature)
        rows = {
            stored_name(generation, name): encode(
                msgspec.structs.replace(row, at=at, run=signature.run, strikes=one.strikes)
            )
            for name, row in new.items()
        }
        return Keeping(uuid=signature.uuid, rows=rows)

    def note_kept(self, number: int) -> None:
        """Note that so many new ones are stored."""
        one = self.execution
        one.kept, one.kept_newly, one.knows_kept = one.kept + number, True, True

    def lost(self, new: Mapping[str, Checkpoint]) -> StepLost:
        """Return the error of a run that has lost its delivery."""
        signature = self.execution.signature
        return StepLost(
            f"task {signature.name} {signature.uuid}: this run is not the task's any more, and "
            f"step {', '.join(map(repr, new))} is not kept (its lease was lost, or it is over)"
        )

    def receive(self, wanted: Wanted) -> Received:
        return receive(self.execution, wanted)


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
    kept = kept_of(execution.signature)
    if kept is not None and kept.number:
        return True
    if (
        kept is None and execution.delivery.count == 1
    ) or not execution.app.store.backend.features.checkpoints:
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
    """Let checkpoints and signals go with the task's state, or stay with its dead letter.

    If it has ended, that is.

    A failure does no harm: they stay longer.
    """
    settlement, backend = execution.settlement, execution.app.store.backend
    if settlement is None or verdict is FENCED or not backend.features.checkpoints:
        return
    state = settlement.states[0] if settlement.states else None
    if state is None or state.state not in FINISHED:
        return
    has_asked = execution.context is None or execution.knows_kept is not None
    if not (has_asked or execution.delivery.count > 1 or kept_of(execution.signature) is not None):
        return  # it has run to its end, and made no step
    life: float = CHECKPOINT_LIFE
    if settlement.fate is not Fate.DEAD:
        life = state.life(execution.app.config.results_expire_in) + MARGIN
    try:
        backend.end_checkpoints(settlement.uuid, life)
    except MachineryError as error:
        logger.debug("checkpoints of task %s stay for now: %s", settlement.uuid, error)
    end_mailbox(execution, 0 if state.state is SUCCESS else life)
