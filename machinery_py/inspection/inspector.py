"""The methods of `server.inspect`."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from typing import Final

from machinery_py.app import Application
from machinery_py.async_twins import twin
from machinery_py.backends.listings import Count
from machinery_py.bounds import in_steps
from machinery_py.brokers.base import DeadLetter, WorkerInfo
from machinery_py.clock import LONGEST, Seconds, seconds_of
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    MachineryError,
    QueueNotFound,
    StateNotFound,
    Unsupported,
)
from machinery_py.inspection.calls import WAITING, decoded
from machinery_py.inspection.limits import LimitReport, limit_reports
from machinery_py.inspection.replay import anew, replay, replayed
from machinery_py.inspection.reports import (
    ErrorSummary,
    QueueReport,
    TaskPage,
    TaskReport,
    children_of,
    steps_of,
)
from machinery_py.inspection.search import (
    UNTIMED,
    Filter,
    moment,
    search,
    states_of,
    summary,
)
from machinery_py.inspection.why import GROUP, AskWorkers, why
from machinery_py.names import check_queue
from machinery_py.revocation import purge
from machinery_py.signals import open_wait
from machinery_py.tasks.attempts import attempts_of
from machinery_py.tasks.reasons import Why
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger, quoted
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

AWAY = (BrokerUnavailable, BackendUnavailable)
RATE_WINDOW = 60.0  # seconds that "per minute" is counted over
MOST = 100_000  # dead letters that one call looks through
NEWEST = 1_000  # that it looks through first
MEMBERS = 1000  # of a group, whose states are read
ASKED = 0.5  # seconds for a worker to say what it runs


class Inspector:
    """The methods of `server.inspect`; any thread may call them, and each has an `_async` twin."""

    def __init__(
        self, app: Application, settle: Callable[[Application], object], ask: AskWorkers
    ) -> None:
        """Args: `settle` settles the groups that are ready; `ask` asks workers, by their names."""
        self._app = app
        self._settle = settle
        self._ask = ask

    def queues(self) -> list[QueueReport]:
        """Return a report for each queue that has ever been used.

        `failed` and `per_minute` are 0 with a backend that cannot list its states.
        """
        store, now = self._app.store, self._app.now()

        def ended(seconds: float) -> dict[str, tuple[int, int]]:
            if not store.backend.features.listing:
                return {}
            counts: dict[str, tuple[int, int]] = {}
            for one in store.backend.finished_since(now - dt.timedelta(seconds=seconds)):
                good, bad = counts.get(one.queue, (0, 0))
                counts[one.queue] = good + one.succeeded, bad + one.failed
            return counts

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

    queues_async: Final = twin(queues)

    def limits(self) -> list[LimitReport]:
        """Return the limits of tasks and limiters: what runs and waits by them.

        Raises:
            ConfigError, Unsupported: there is no lock store, or it keeps no limits.
        """
        return limit_reports(self._app)

    limits_async: Final = twin(limits)

    def workers(self) -> list[WorkerInfo]:
        """Return the live workers."""
        return self._app.store.broker.workers()

    workers_async: Final = twin(workers)

    def search(
        self,
        *,
        state: str | State | Sequence[str | State] = (),
        name: str = "",
        queue: str = "",
        worker: str = "",
        text: str = "",
        since: dt.datetime | Seconds | None = None,
        until: dt.datetime | Seconds | None = None,
        limit: int = 100,
        cursor: str = "",
        within: Seconds = 0.25,
    ) -> TaskPage:
        """Return a page of the states of tasks, the last changed first.

        It may hold few tasks, or none, though more follow: then the time was up. A task that
        changes meanwhile moves to the front, and does not come again.

        Args:
            state: some of the six, in any case; "failed", "done" and the like are understood.
            text: in any case, in errors, error types, results, and arguments where the message is
                kept (`TaskReport`).
            since, until: last changed then or between; or so long ago, in seconds or a timedelta.
            cursor: of the page before.
            within: seconds (or a timedelta) that are spent on looking.

        Raises:
            ArgumentError: the cursor is none, or a moment has no time zone or is none.
            TypeError, ValueError: there is no such state, or `within` is no length.
            Unsupported: the backend cannot list its states.
        """
        length = seconds_of("within", within)
        wanted = Filter(
            states=states_of(state),
            name=name,
            queue=queue,
            worker=worker,
            text=text.casefold(),
            since=moment(self._app, "since", since),
            until=moment(self._app, "until", until),
        )
        return search(self._app, wanted, limit=limit, cursor=cursor, within=length)

    search_async: Final = twin(search)

    def tasks(
        self,
        *,
        state: str | State | None = None,
        name: str = "",
        since: dt.datetime | Seconds | None = None,
        queue: str = "",
        limit: int = 50,
        worker: str = "",
        text: str = "",
    ) -> list[TaskState]:
        """Return the states of tasks, the last changed first, however long that takes.

        Args:
            queue: without another filter: the waiting tasks of the queue, the next to run first.
            state, since, text: as of `search`.
        """
        if queue and since is None and not (state or name or worker or text):
            messages = self._app.store.broker.pending(queue, limit)
            states = self._app.store.backend.get_states([message.uuid for message in messages])
            return [states[message.uuid] for message in messages if message.uuid in states]
        page = self.search(
            state=state or (),
            name=name,
            queue=queue,
            worker=worker,
            text=text,
            since=since,
            limit=limit,
            within=UNTIMED,
        )
        return list(page.tasks)

    tasks_async: Final = twin(tasks)

    def errors(
        self,
        *,
        since: dt.datetime | Seconds | None = None,
        name: str = "",
        queue: str = "",
        within: Seconds = 0.25,
    ) -> ErrorSummary:
        """Group the kept failures by task and error type, the newest first until the time is up.

        Args:
            since, within: as of `search`, which also says what is raised.
        """
        states, begun_at = [State.FAILURE], moment(self._app, "since", since)
        wanted = Filter(states=states, name=name, queue=queue, since=begun_at)
        return summary(self._app, wanted, within=seconds_of("within", within))

    errors_async: Final = twin(errors)

    def history(self, *, seconds: Seconds = 3600.0, step: Seconds = 60) -> list[Count]:
        """Return how many tasks ended of late, by queue and by steps of so many seconds.

        Both are seconds or timedeltas. The steps are whole seconds of unix time; one in which
        nothing ended is left out. Redis knows the last hour, other stores what they still keep.
        """
        length = seconds_of("seconds", seconds, most=LONGEST)
        steps = max(1, math.ceil(seconds_of("step", step, most=LONGEST)))
        begun_at = self._app.now() - dt.timedelta(seconds=length)
        return self._app.store.backend.finished_since(begun_at, steps)

    history_async: Final = twin(history)

    def find(self, prefix: str) -> str:
        """Return the UUID with this prefix; a backend that cannot list its states needs all of it.

        Raises:
            StateNotFound: there is none.
            MachineryError: there are several.
        """
        backend = self._app.store.backend
        if backend.features.keeps and not backend.features.listing:
            return backend.get_state(prefix).task_uuid or prefix
        if backend.get_states([prefix]):
            return prefix  # most often; some stores look through all names for another
        found = backend.find(prefix, 2)
        if not found:
            raise StateNotFound(prefix)
        if len(found) > 1:
            raise MachineryError(
                f"several tasks begin with {prefix!r}: {', '.join(found)}, … (give more of it)"
            )
        return found[0]

    find_async: Final = twin(find)

    def task(self, uuid: str, *, ask: bool = False) -> TaskReport:
        """Return all that is known of a task; the start of its UUID is enough.

        Args:
            ask: True: of a task that runs, its worker is asked for the arguments, if its state does
                not have them. That takes half a second at most.

        Raises:
            StateNotFound: nothing is known.
        """
        backend = self._app.store.backend
        state = backend.get_state(self.find(uuid))
        wait = open_wait(self._app, state)
        if wait is not None:
            body = wait.body
        else:
            kept = b"" if state.state in WAITING else state.message
            body = kept if kept or state.is_finished else self._waiting_body(state)
        signature = decoded(body)
        signal = "" if wait is None or wait.child else wait.name
        rows = backend.checkpoints(state.task_uuid) if backend.features.checkpoints else {}
        if signature is None:
            args = self._running_args(state) if ask else None
            return TaskReport(state=state, args=args, steps=steps_of(rows), waits_for=signal)
        group = backend.get_group(signature.group_uuid) if signature.group_uuid else None
        uuids = group.task_uuids[:MEMBERS] if group is not None else ()
        states = backend.member_states(signature.group_uuid, uuids) if uuids else {}
        return TaskReport(
            state=state,
            signature=signature,
            args=signature.args,
            attempts=attempts_of(signature),
            children=children_of(signature),
            group=group,
            members=[states[uuid] for uuid in uuids if uuid in states],
            steps=steps_of(rows),
            waits_for=signal,
        )

    task_async: Final = twin(task)

    def why(self, uuid: str, *, stack: bool = False, ask: bool = True) -> Why:
        """Return what holds a task that has not ended; also of a group, by its whole UUID.

        Args:
            uuid: the start of it is enough.
            stack: also what the thread of a task that runs does now.
            ask: False: workers are not asked, which can take some seconds, and less is found.

        Raises:
            StateNotFound: nothing is known; a step of a workflow has no state before its turn.
        """
        uuid = uuid if uuid.startswith(GROUP) else self.find(uuid)
        return why(self._app, self._ask if ask else None, uuid, stack=stack)

    why_async: Final = twin(why)

    def _running_args(self, state: TaskState) -> Sequence[Arg] | None:
        """Return what the worker says that this task was called with."""
        if state.state is not State.STARTED or not state.worker:
            return None
        try:
            answers = self._ask(state.worker, timeout=ASKED).active()
        except MachineryError:
            return None
        running = (one for tasks in answers.values() for one in tasks)
        return next((one.args for one in running if one.uuid == state.task_uuid), None)

    def _waiting_body(self, state: TaskState) -> bytes:
        broker = self._app.store.broker
        try:
            waiting = [*broker.pending(state.queue, 1000), *broker.delayed(1000)]
        except Unsupported:
            return b""
        return next((message.body for message in waiting if message.uuid == state.task_uuid), b"")

    def delete(self, uuids: Sequence[str]) -> list[str]:
        """Forget the states of finished tasks, and return the UUIDs of those that are forgotten.

        Others stay, and so do results that a chord waits for.

        Raises:
            Unsupported: the backend cannot list its states.
        """
        backend = self._app.store.backend
        return [uuid for some in in_steps(uuids) for uuid in backend.delete_finished(some)]

    delete_async: Final = twin(delete)

    def retry(
        self,
        uuids: Sequence[str] = (),
        *,
        state: str | State = State.FAILURE,
        name: str = "",
        since: dt.datetime | Seconds | None = None,
        limit: int = 10_000,
        from_start: bool = False,
    ) -> list[str]:
        """Send failed tasks again, at once, with all their retries and under the same UUIDs.

        A task with steps goes on behind its checkpoints.

        Args:
            uuids: of the tasks; without them all that the filter finds.
            from_start: all steps are made again, with other keys.

        Returns:
            The UUIDs of the tasks that were sent.

        Raises:
            PublishRefused: all of some thousand were refused for good, or the broker is away.
            StepRefused: checkpoints of each are gone; nothing was sent (of some: they are logged).
        """
        if uuids:
            found = list(self._app.store.backend.get_states(list(uuids)).values())
        else:
            found = self.tasks(state=state, name=name, since=since, limit=limit)
        failed = [one for one in found if one.state is State.FAILURE and one.message]
        pairs = [anew(decode_signature(one.message)) for one in failed]
        return replay(self._app, pairs, from_start=from_start)

    retry_async: Final = twin(retry)

    def purge(self, queue: str, *, progress: Callable[[int], object] | None = None) -> int:
        """Revoke the tasks that wait in a queue or are delayed for it; return how many messages.

        Each ends as FAILURE (error type "Revoked"), with all that follows: error callbacks, chords
        that end, keys that are free. Then its message is deleted. Tasks that other programs sent
        without a record are only deleted. What is sent meanwhile may stay.

        Args:
            progress: called after each step, of some hundred messages, with the number so far.

        Raises:
            QueueNotFound: it is no queue of ours; nothing was deleted.
            BackendUnavailable, BrokerUnavailable, PublishRefused, PublishUnknown: some of it is
                done; repeat it.
        """
        check_queue(queue)
        self._must_be_ours(queue)
        count = purge(self._app, queue, progress)
        self._settle(self._app)
        return count

    purge_async: Final = twin(purge)

    def forget_queue(self, queue: str) -> bool:
        """Delete the name and the counters of a queue that is over, of one made at run time say.

        Returns:
            False: it is in use, and nothing was changed. Something waits, is delayed, runs, is dead
            or paused there, or a worker serves it. The next message makes the queue anew.

        Raises:
            QueueNotFound: it is no queue of ours.
            Unsupported: the broker cannot (`BrokerFeatures.forgets_queues`): RabbitMQ, a cluster.
        """
        self._must_be_ours(queue)
        return self._app.store.broker.forget_queue(queue)

    forget_queue_async: Final = twin(forget_queue)

    def _must_be_ours(self, queue: str) -> None:
        check_queue(queue)
        known = [stats.queue for stats in self._app.store.broker.stats()]
        if queue not in known:
            raise QueueNotFound(queue, known)

    def pause(self, queue: str) -> None:
        """Let no worker take tasks from this queue until `resume`, also after a restart.

        Workers run the tasks that they have taken. Tasks can still be sent. The queue need not
        exist.

        Raises:
            Unsupported: the broker cannot.
        """
        check_queue(queue)
        self._app.store.broker.pause(queue)

    pause_async: Final = twin(pause)

    def resume(self, queue: str) -> None:
        """Let workers take from this queue again; nothing happens if it was not paused."""
        self._app.store.broker.resume(queue)

    resume_async: Final = twin(resume)

    # Dead letters

    def dead(self, *, limit: int = 50, queue: str = "") -> list[DeadLetter]:
        """Return the newest dead letters."""
        return self._app.store.broker.dead_letters(limit=limit, queue=queue)

    dead_async: Final = twin(dead)

    def dead_letter(self, id: str) -> DeadLetter:
        """Return a dead letter by its id, or the newest by the start of its id or its task's UUID.

        Raises:
            StateNotFound: there is none.
        """
        return self._letters([id])[0]

    dead_letter_async: Final = twin(dead_letter)

    def replay_dead(self, ids: Sequence[str], *, from_start: bool = False) -> list[str]:
        """Put dead letters back into their queues, byte for byte and without strikes.

        A task that failed, or lost its processes, is sent as before its first try, as by `retry`.
        `from_start`, and what is raised of checkpoints, as there.

        Letters that are no signature stay, since nobody could run them, and so do those that the
        broker refuses for good.

        Returns:
            The UUIDs of the tasks that were sent.
        """
        letters = self._letters(ids)
        found = [(letter, decoded(letter.body)) for letter in letters]
        usable = [(letter, one) for letter, one in found if one is not None and one.name]
        # Published first, removed then: after a crash in between there is a letter too many, never
        # one too few.
        pairs = [replayed(letter, one) for letter, one in usable]
        sent = replay(self._app, pairs, from_start=from_start)
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

    replay_dead_async: Final = twin(replay_dead)

    def delete_dead(self, ids: Sequence[str]) -> int:
        """Delete dead letters, and return how many."""
        return len(self._app.store.broker.take_dead([one.id for one in self._letters(ids)]))

    delete_dead_async: Final = twin(delete_dead)

    def _letters(self, ids: Sequence[str]) -> list[DeadLetter]:
        """Return these dead letters; looks through all if one id is not that of a recent one."""
        letters: list[DeadLetter] = []
        same: dict[str, DeadLetter] = {}
        for limit in (NEWEST, MOST):
            letters = self.dead(limit=limit)
            same = {one.id: one for one in letters}
            if all(id in same for id in ids):
                break
        return [same.get(id) or _beginning(letters, id) for id in ids]


def _beginning(letters: Sequence[DeadLetter], start: str) -> DeadLetter:
    for one in letters:
        if one.id.startswith(start) or one.uuid.startswith(start):
            return one
    raise StateNotFound(start, f"no dead letter {quoted(start)}")
