"""`server.inspect`: reports on queues, workers, tasks and dead letters, and actions on them."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Sequence

import msgspec

from machinery_py.app import STEP_FAILED, Application
from machinery_py.async_twins import twin
from machinery_py.brokers.base import DeadLetter, Message, WorkerInfo
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    DecodeError,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StateNotFound,
    Unsupported,
)
from machinery_py.names import check_queue
from machinery_py.stores.base import REASON_FAILED, Submission
from machinery_py.tasks.signature import (
    HEADER_ATTEMPT,
    HEADER_LAST,
    HEADER_LOST,
    HEADER_LOST_HOW,
    HEADER_POSTPONED,
    HEADER_RUN,
    UNLIMITED,
    Signature,
    new_uuid,
)
from machinery_py.tasks.states import State, TaskState, state_named
from machinery_py.texts import get_logger, quoted
from machinery_py.wire.signatures import decode_signature, encode_signature

logger = get_logger(__name__)

AWAY = (BrokerUnavailable, BackendUnavailable)
RATE_WINDOW = 60.0  # seconds that "per minute" is counted over
MOST = 100_000  # states or dead letters that one call looks through


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one queue.

    Attributes:
        failed: tasks that failed and whose states are still kept.
        oldest: seconds that its oldest waiting message has waited.
        per_minute: tasks that ended in the last minute.
        paused: whether workers take nothing from it.
    """

    queue: str
    waiting: int
    running: int
    delayed: int
    dead: int
    failed: int
    oldest: float
    per_minute: int
    paused: bool = False


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a task, and its signature if it failed or waits in a queue, else None."""

    state: TaskState
    signature: Signature[object] | None = None


def worker_hint(app: Application, queue: str) -> tuple[str, str]:
    """Return why nobody runs the tasks of a queue, and what to type; empty if somebody does."""
    default = app.config.default_queue
    queue = queue or default
    broker = app.store.broker
    try:
        if queue in broker.paused():
            return f"{queue!r} is paused", f"resume it: machinery resume {_module(app)} {queue}"
        if any(queue in worker.queues for worker in broker.workers()):
            return "", ""
    except MachineryError:
        return "", ""
    other = "" if queue == default else f" -Q {queue}"
    return f"no worker on {queue!r}", f"start one: machinery worker {_module(app)}{other}"


def _module(app: Application) -> str:
    """Return the application as the command line names it."""
    unknown = "<your module>"
    module = next((task.__module__ for task in app.registry), unknown)
    if module == "__main__":
        path = getattr(sys.modules["__main__"], "__file__", unknown)
        module = path.rpartition("/")[2].removesuffix(".py")
    return module


class Inspector:
    """The methods of `server.inspect`; any thread may call them, and each has an `_async` twin."""

    def __init__(self, app: Application) -> None:
        self._app = app

    def queues(self) -> list[QueueReport]:
        """Return a report for each queue that has ever been used.

        `failed` and `per_minute` are 0 with a backend that cannot list its states.
        """
        store, now = self._app.store, self._app.clock.now()

        def ended(seconds: float) -> dict[str, tuple[int, int]]:
            if not store.backend.features.listing:
                return {}
            return store.backend.finished_since(now - dt.timedelta(seconds=seconds))

        rates, failures = ended(RATE_WINDOW), ended(self._app.config.results_expire_in)
        return [
            QueueReport(
                queue=stats.queue,
                waiting=stats.waiting,
                running=stats.running,
                delayed=stats.delayed,
                dead=stats.dead,
                failed=failures.get(stats.queue, (0, 0))[1],
                oldest=max(0.0, (now - (stats.oldest_at or now)).total_seconds()),
                per_minute=sum(rates.get(stats.queue, (0, 0))),
                paused=stats.paused,
            )
            for stats in store.broker.stats()
        ]

    queues_async = twin(queues)

    def workers(self) -> list[WorkerInfo]:
        """Return the live workers."""
        return self._app.store.broker.workers()

    workers_async = twin(workers)

    def tasks(
        self,
        *,
        state: str | State | None = None,
        name: str = "",
        since: dt.datetime | float | None = None,
        queue: str = "",
        limit: int = 50,
    ) -> list[TaskState]:
        """Return the states of tasks, the last changed first.

        Args:
            state: one of the six, in any case; "failed", "done" and the like are understood.
            since: changed at or after this moment, or at most that many seconds ago.
            queue: without another filter: the waiting tasks of the queue, the next to run first.
        """
        if queue and state is None and not name and since is None:
            messages = self._app.store.broker.pending(queue, limit)
            states = self._app.store.backend.get_states([message.uuid for message in messages])
            return [states[message.uuid] for message in messages if message.uuid in states]
        if isinstance(since, int | float):
            since = self._app.clock.now() - dt.timedelta(seconds=since)
        wanted = state_named(state) if isinstance(state, str) else state
        found = self._app.store.backend.list_states(
            state=wanted, name=name, since=since, limit=limit if not queue else MOST
        )
        return [one for one in found if queue in ("", one.queue)][:limit]

    tasks_async = twin(tasks)

    def find(self, prefix: str) -> str:
        """Return the UUID with this prefix; a backend that cannot list its states needs all of it.

        Raises:
            StateNotFound: there is none.
            MachineryError: there are several.
        """
        backend = self._app.store.backend
        if backend.features.keeps and not backend.features.listing:
            return backend.get_state(prefix).task_uuid or prefix
        found = backend.find(prefix, 2)
        if not found:
            raise StateNotFound(prefix)
        if len(found) > 1 and prefix not in found:
            raise MachineryError(
                f"several tasks begin with {prefix!r}: {', '.join(found)}, … (give more of it)"
            )
        return prefix if prefix in found else found[0]

    find_async = twin(find)

    def task(self, uuid: str) -> TaskReport:
        """Return all that is known of a task; the start of its UUID is enough.

        Raises:
            StateNotFound: nothing is known.
        """
        state = self._app.store.backend.get_state(self.find(uuid))
        body = state.message if state.is_finished else self._waiting_body(state)
        return TaskReport(state=state, signature=_decoded(body))

    task_async = twin(task)

    def _waiting_body(self, state: TaskState) -> bytes:
        broker = self._app.store.broker
        try:
            waiting = [*broker.pending(state.queue, 1000), *broker.delayed(1000)]
        except Unsupported:
            return b""
        return next((message.body for message in waiting if message.uuid == state.task_uuid), b"")

    def retry(
        self,
        uuids: Sequence[str] = (),
        *,
        state: str | State = State.FAILURE,
        name: str = "",
        since: dt.datetime | float | None = None,
        limit: int = 10_000,
    ) -> list[str]:
        """Send failed tasks again, at once, with all their retries and under the same UUIDs.

        Args:
            uuids: of the tasks; without them all that the filter finds.

        Returns:
            The UUIDs of the tasks that were sent.

        Raises:
            PublishRefused: all of some thousand were refused for good, or the broker is away.
        """
        if uuids:
            found = list(self._app.store.backend.get_states(list(uuids)).values())
        else:
            found = self.tasks(state=state, name=name, since=since, limit=limit)
        failed = [
            _anew(decode_signature(one.message))
            for one in found
            if one.state is State.FAILURE and one.message
        ]
        return self._replay([(one, encode_signature(one)) for one in failed])

    retry_async = twin(retry)

    def _replay(self, pairs: Sequence[tuple[Signature[object], bytes]]) -> list[str]:
        """Send these messages again; return the UUIDs, without those that were refused for good."""
        sent: list[str] = []
        for start in range(0, len(pairs), 1000):
            sent += self._replay_batch(pairs[start : start + 1000])
        return sent

    def _replay_batch(self, pairs: Sequence[tuple[Signature[object], bytes]]) -> list[str]:
        now = self._app.clock.now()
        submission = Submission(
            token=new_uuid(""),
            messages=[
                Message(
                    uuid=one.uuid,
                    name=one.name,
                    queue=one.routing_key,
                    body=body,
                    priority=one.priority,
                )
                for one, body in pairs
            ],
            states=[
                *(self._app.pending(one, now) for one, _ in pairs),
                *self._mended([one for one, _ in pairs]),
            ],
            replay=True,
        )
        try:
            self._app.store.submit(submission)
        except (PublishRefused, PublishUnknown) as error:
            if not error.permanent or len(pairs) == 1:
                raise
            refused: MachineryError = error
        else:
            return [one.uuid for one, _ in pairs]
        sent: list[str] = []
        for pair in pairs:
            try:
                sent += self._replay_batch([pair])
            except (PublishRefused, PublishUnknown) as error:
                if not error.permanent:
                    raise
                uuid = pair[0].uuid
                logger.error(
                    "task %s cannot be sent again: %s", uuid, error, extra={"task_uuid": uuid}
                )
                refused = error
        if not sent:
            raise refused
        return sent

    def _mended(self, signatures: Sequence[Signature[object]]) -> list[TaskState]:
        """Return new states of the tasks that failed only because a step before them had failed."""
        lasts = {
            str(one.headers[HEADER_LAST]) for one in signatures if one.headers.get(HEADER_LAST)
        }
        states = self._app.store.backend.get_states(sorted(lasts)).values() if lasts else ()
        return [
            TaskState(
                task_uuid=one.task_uuid,
                task_name=one.task_name,
                created_at=one.created_at,
                queue=one.queue,
            )
            for one in states
            if one.state is State.FAILURE and one.error_type == STEP_FAILED
        ]

    def purge(self, queue: str) -> int:
        """Delete all waiting and delayed messages of a queue, and return how many."""
        check_queue(queue)
        return self._app.store.broker.purge(queue)

    purge_async = twin(purge)

    def pause(self, queue: str) -> None:
        """Let no worker take tasks from this queue until `resume`, also after a restart.

        Workers run the tasks that they have taken. Tasks can still be sent. The queue need not
        exist.

        Raises:
            Unsupported: the broker cannot.
        """
        check_queue(queue)
        self._app.store.broker.pause(queue)

    pause_async = twin(pause)

    def resume(self, queue: str) -> None:
        """Let workers take from this queue again; nothing happens if it was not paused."""
        self._app.store.broker.resume(queue)

    resume_async = twin(resume)

    # Dead letters

    def dead(self, *, limit: int = 50, queue: str = "") -> list[DeadLetter]:
        """Return the newest dead letters."""
        return self._app.store.broker.dead_letters(limit=limit, queue=queue)

    dead_async = twin(dead)

    def dead_letter(self, id: str) -> DeadLetter:
        """Return a dead letter by its id, or the newest by the start of its id or its task's UUID.

        Raises:
            StateNotFound: there is none.
        """
        letters = self.dead(limit=MOST)
        same = [one for one in letters if one.id == id]
        similar = [one for one in letters if one.id.startswith(id) or one.uuid.startswith(id)]
        if not similar:
            raise StateNotFound(id, f"no dead letter {quoted(id)}")
        return (same or similar)[0]

    dead_letter_async = twin(dead_letter)

    def replay_dead(self, ids: Sequence[str]) -> list[str]:
        """Put dead letters back into their queues, byte for byte and without strikes.

        A task that failed, or lost its processes, is sent as before its first try, as by `retry`.

        Letters that are no signature stay, since nobody could run them, and so do those that the
        broker refuses for good.

        Returns:
            The UUIDs of the tasks that were sent.
        """
        letters = [self.dead_letter(id) for id in ids]
        found = [(letter, _decoded(letter.body)) for letter in letters]
        usable = [(letter, one) for letter, one in found if one is not None and one.name]
        # Published first, removed then: after a crash in between there is a letter too many, never
        # one too few.
        sent = self._replay([_replayed(letter, one) for letter, one in usable])
        gone = frozenset(sent)
        taken = [letter.id for letter, one in usable if one.uuid in gone]
        try:
            try:
                self._app.store.broker.take_dead(taken)
            except AWAY:  # the reply may be lost: once more
                self._app.store.broker.take_dead(taken)
        except AWAY as error:
            # An exception would say that nothing was done; its caller would run the tasks twice.
            logger.warning(
                "%d dead letters were put back into their queues, and may still be in the list "
                "(delete them): %s: %s",
                len(taken),
                ", ".join(taken[:5]),
                error,
            )
        return sent

    replay_dead_async = twin(replay_dead)

    def delete_dead(self, ids: Sequence[str]) -> int:
        """Delete dead letters, and return how many."""
        return len(self._app.store.broker.take_dead([self.dead_letter(id).id for id in ids]))

    delete_dead_async = twin(delete_dead)


def _replayed(letter: DeadLetter, signature: Signature[object]) -> tuple[Signature[object], bytes]:
    """Return what is sent in place of the letter."""
    if letter.reason == REASON_FAILED or signature.strikes:
        signature = _anew(signature)
        return signature, encode_signature(signature)
    return signature, letter.body


def _anew(signature: Signature[object]) -> Signature[object]:
    """Return the signature as before its first try; each counted try took one from RetryCount."""
    ours = (HEADER_RUN, HEADER_ATTEMPT, HEADER_POSTPONED, HEADER_LOST, HEADER_LOST_HOW)
    tries = signature.retry_count + signature.attempt - 1
    return signature.replace(
        headers={key: value for key, value in signature.headers.items() if key not in ours},
        retry_count=min(UNLIMITED, tries),  # a message may hold any number
        retry_timeout=0,
        eta=None,
    )


def _decoded(body: bytes) -> Signature[object] | None:
    """Return the signature; None if the bytes are none."""
    try:
        return decode_signature(body) if body else None
    except DecodeError:
        return None
