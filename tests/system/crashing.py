"""A process that kills itself at a chosen point; run by test_crash_points.py.

    python -m tests.system.crashing worker POINT          run a worker until killed or idle
    python -m tests.system.crashing send SHAPE POINT      publish one shape
    python -m tests.system.crashing unique NAME POINT     send a unique task
    python -m tests.system.crashing signal UUID POINT     send it the signal "go"
    python -m tests.system.crashing revoke UUID POINT     revoke a task that waits

The stores are wrapped at their contracts, so the library knows nothing of this. Every call of user
code is noted in a ledger that no store can lose: one write to an append-only file. At the point
`write-3-before`, the third command that writes to MongoDB is not sent; at `write-3-after`, it was
carried out and its reply is lost.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pymongo import monitoring

from machinery_py import Config, Replace, Server, State, chord, current_task, group
from machinery_py.backends.base import Keeping, Verdict
from machinery_py.brokers.base import Delivery
from machinery_py.brokers.putting import PutsAhead, Putting
from machinery_py.errors import SignalTimeout
from machinery_py.rows import sqlite
from machinery_py.stores import redis_steps
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    StoreTransaction,
    Submission,
)
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.rows import RowsStore

server = Server(
    Config(
        broker=os.environ.get("CRASH_BROKER", "memory://"),
        result_backend=os.environ.get("CRASH_BACKEND", "memory://"),
        lease=float(os.environ.get("CRASH_LEASE", "10")),
    )
)


def note(*words: object) -> None:
    line = " ".join(map(str, words)) + "\n"
    ledger = os.open(os.environ["CRASH_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, line.encode())
    finally:
        os.close(ledger)


@server.task
def plain(number: int) -> int:
    note("plain", number)
    killer.reach("in-task")
    return number


@server.task
def after(*numbers: int) -> int:
    note("after", *numbers)
    return sum(numbers)


@server.task(unique=True)
def alone(name: str) -> str:
    note("alone", name)
    return name


@server.task
def on_error(error: str) -> None:
    note("on_error", error)


@server.task(retries=1, backoff=[0.01])
def shaky(number: int) -> int:
    attempt = current_task().attempt
    note("shaky", attempt)
    killer.reach("in-task")
    if attempt == 1:
        raise ValueError("not yet")
    return number


@server.task(ack="early")
def early(number: int) -> int:
    note("early", number)
    killer.reach("in-task")
    return number


@server.task
def broken() -> None:
    note("broken")
    killer.reach("in-task")
    raise ValueError("broken")


@server.task
def gives_way() -> None:
    note("gives_way")
    killer.reach("in-task")
    raise Replace(group(plain.signature(1), plain.signature(2)) | after.partial())


STEPS = 3


@server.task(retries=1, backoff=[0.01])
def steps() -> int:
    """Make three steps, fail once, and make them again."""
    task = current_task()
    done = sum(task.step(f"step-{number}", _step, number) for number in range(STEPS))
    if task.attempt == 1:
        raise ValueError("not yet")
    return done


def _step(number: int) -> int:
    note(f"step-{number}", current_task().step_key)
    killer.reach(f"in-step-{number}")
    return 1


@server.task
def waits() -> int:
    """Wait for the signal "go", and make a step of its value."""
    task = current_task()
    return task.step("made", _made_of, task.wait_for("go", timeout=3600))


@server.task
def times_out() -> int:
    """Wait for a signal that nobody sends, and make a step."""
    task = current_task()
    try:
        task.wait_for("go", timeout=0.2)
    except SignalTimeout:
        return task.step("made", _made_of, 7)
    return 0


@server.task
def answer(value: int) -> int:
    note("answered", value)
    return value


@server.task
def asks() -> int:
    """Wait for another task's result, and make a step of it."""
    task = current_task()
    return task.step("made", _made_of, task.wait_for(answer.signature(7)))


def _made_of(value: int) -> int:
    note("made", value)
    return value


@server.task(retries=1, backoff=[0.01])
def books() -> int:
    """Make three steps in transactions, fail once, and make them again."""
    task = current_task()
    done = sum(
        task.step(f"book-{number}", transaction=True)(_book, number) for number in range(STEPS)
    )
    if task.attempt == 1:
        raise ValueError("not yet")
    return done


def _book(number: int) -> int:
    note(f"book-{number}")
    current_task().connection.execute("INSERT INTO orders VALUES (%s)", (number,))
    killer.reach(f"in-book-{number}")
    return 1


SHAPES: dict[str, Callable[[], Any]] = {
    "task": lambda: plain.signature(1).then(after.partial()),
    "retry": lambda: shaky.signature(1).then(after.partial()),
    "failure": lambda: broken.signature().catch(on_error.partial()),
    "chain": lambda: plain.signature(1) | after.partial(2) | after.partial(3),
    "group": lambda: group(plain.signature(n) for n in range(5)),
    "chord": lambda: group(plain.signature(n) for n in range(5)) | after.partial(),
    "broken-chord": lambda: chord(
        group(plain.signature(1), broken.signature()), after.partial().catch(on_error.partial())
    ),
    "barrier": lambda: (
        group(plain.signature(n) for n in range(2)) | group(after.partial(), after.partial())
    ),
    "replaced": lambda: gives_way.signature() | after.partial(),
    "delayed": lambda: (
        plain.options(eta=dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=0.05))
        .signature(1)
        .then(after.partial())
    ),
}

#: Where RabbitMQ has a queue of this name with other arguments.
REFUSED: dict[str, Callable[[], Any]] = {
    "refused": lambda: (
        plain.signature(1) | after.options(queue="refused").partial().catch(on_error.partial())
    ),
}

#: A task, a member of a chord and the first of its chain, that is to be revoked before it begins.
REVOKED = "task_revoked"


def revoked() -> Any:
    first = plain.options(uuid=REVOKED).signature(1).catch(on_error.partial())
    return chord(
        group(first | after.partial(), plain.signature(2)),
        after.partial().catch(on_error.partial()),
    )


#: Of a task with steps: in a step, before it is kept, while that is not committed, and behind it.
STEP_POINTS = tuple(
    f"{where}-step-{number}"
    for number in range(STEPS)
    for where in ("in", "before", "inside", "after")
)


#: Of one whose steps have transactions: it has written, its checkpoint is not; it is; committed.
BOOK_POINTS = tuple(
    f"{where}-book-{number}"
    for number in range(STEPS)
    for where in ("in", "before", "inside", "after")
)


SENDER_POINTS = ("before-submit", "after-submit")
WORKER_POINTS = (
    "after-claim",
    "after-mark",
    "in-task",
    "before-settle",
    "inside-settle",
    "after-settle",
    "before-fire",
    "inside-fire",
    "after-fire",
    "before-tend",
    "after-tend",
)


#: Of a run that ends in a wait: around the step that suspends its task.
WAIT_POINTS = ("before-settle", "after-settle")
#: Of whoever ends a wait, a sender or a timer: around the submission that does it.
WAKE_POINTS = ("before-wake", "after-wake")


#: Between the steps of a change in two stores: what follows is published, its outbox is cleared.
TWO_STORE_POINTS = ("after-put", "after-clear")


#: Of a sender to two stores, around the moment that the broker has its message.
PUT_POINTS = ("before-put", "behind-put")


#: Of a sender whose message and state are on their way at once: the state is not written; it is.
AHEAD_POINTS = ("behind-message", "behind-state")


#: Of a sender to Redis that submits in steps of two messages: one is staged, all of them are, they
#: are committed, and one is carried out.
STAGED_POINTS = ("after-stage", "after-staged", "after-commit", "after-carry")


#: Around the steps 2a and 2b of stores/outbox.py.
REFUSAL_POINTS = ("before-bury", "after-bury", "after-failure")


#: Of a revocation: around its two steps in revocation.py, and the end of a chord that it breaks.
REVOKE_POINTS = (
    "before-remember",
    "after-remember",
    "before-fire",
    "inside-fire",
    "after-fire",
    "before-chord",
    "after-chord",
)


#: Of a RabbitMQ backend's settling or firing transaction: nothing written; all written, locks held.
TX_POINTS = ("tx-before-end", "tx-after-end")


class Killer:
    """Ends this process with SIGKILL the first time that its point is reached."""

    def __init__(self, point: str = "") -> None:
        self.point = point
        self.inside = threading.local()

    def reach(self, point: str) -> None:
        if point == self.point:
            note("killed", point)
            os.kill(os.getpid(), signal.SIGKILL)


killer = Killer()


class KillingStore(Store):
    """The real store, with points before, inside and after each step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.broker = store.broker
        self.backend = store.backend
        apply = store.backend.apply

        def killing_apply(changes: Any) -> Any:
            verdicts = apply(changes)
            if point := getattr(killer.inside, "step", ""):
                killer.reach(point)
            return verdicts

        store.backend.apply = killing_apply  # type: ignore[method-assign]
        store.backend.revoke = around("before-remember", store.backend.revoke, "after-remember")  # type: ignore[method-assign]
        if isinstance(store, RowsStore):
            kill_before_commits()
        if hasattr(store.backend, "_transactions"):
            kill_in_turns()
        if isinstance(store, TwoStores):
            kill_between_steps(
                ((store.broker, "put"), (store.backend, "clear_outbox")), TWO_STORE_POINTS
            )
            store.broker.put = around("before-put", store.broker.put, "behind-put")  # type: ignore[method-assign]
            store.broker.bury = around("before-bury", store.broker.bury, "after-bury")  # type: ignore[method-assign]
            store._apply_failure = around("", store._apply_failure, "after-failure")  # type: ignore[method-assign]
            if killer.point in AHEAD_POINTS:
                kill_ahead(store)

        if killer.point in STAGED_POINTS:
            steps = store._steps  # type: ignore[attr-defined]
            redis_steps.STEP_ITEMS = steps.most = 2
            steps.stage = around("", steps.stage, "after-staged")
            store.driver.run = after_scripts(store.driver.run)  # type: ignore[attr-defined]

    def submit(self, submission: Submission) -> bool:
        if submission.riders:
            submit = around("before-wake", self._store.submit, "after-wake")
            return bool(submit(submission))
        killer.reach("before-submit")
        done = self._store.submit(submission)
        killer.reach("after-submit")
        return done

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return KillingSession(self._store.open_session(queues, worker=worker))

    def open_transaction(self) -> StoreTransaction:
        return KillingTransaction(self._store.open_transaction())

    def publish_left(self, key: str) -> None:
        self._store.publish_left(key)

    def fire(self, firing: Firing) -> bool:
        killer.reach("before-fire")
        if firing.group_uuid:
            killer.reach("before-chord")
        killer.inside.step = "inside-fire"
        try:
            fired = self._store.fire(firing)
        finally:
            killer.inside.step = ""
        killer.reach("after-fire")
        if firing.group_uuid:
            killer.reach("after-chord")
        return fired

    def tend(self) -> float:
        killer.reach("before-tend")
        pause = self._store.tend()
        killer.reach("after-tend")
        return pause


def kill_before_commits() -> None:
    """Let the killer in when a batch of rows is written and not yet committed."""
    write = sqlite._Batch.write

    def killing_write(batch: sqlite._Batch) -> None:
        write(batch)
        if point := getattr(killer.inside, "step", ""):
            killer.reach(point)

    sqlite._Batch.write = killing_write  # type: ignore[method-assign]


def kill_between_steps(places: Sequence[tuple[Any, str]], points: Sequence[str]) -> None:
    """Let the killer in after each step of a settlement that does anything."""
    for (owner, name), point in zip(places, points, strict=True):
        setattr(owner, name, killing_step(getattr(owner, name), point))


def around(before: str, step: Callable[..., Any], after: str) -> Callable[..., Any]:
    """The step, with points in front of it and behind it."""

    def run(*what: Any, **options: Any) -> Any:
        killer.reach(before)
        done = step(*what, **options)
        killer.reach(after)
        return done

    return run


def kill_ahead(store: TwoStores) -> None:
    """Send the first task as a later one; let the killer in when its message is stored, or both."""
    sender, broker = store._submitter, store.broker
    assert isinstance(broker, PutsAhead)
    begin_put = broker.begin_put

    def confirmed(*what: Any, **options: Any) -> Putting:
        putting = begin_put(*what, **options)
        putting.wait()
        killer.reach("behind-message")
        return putting

    broker.begin_put = confirmed  # type: ignore[method-assign]
    sender._stored_at = math.inf
    sender._store_states = around("", sender._store_states, "behind-state")  # type: ignore[method-assign]


def after_scripts(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let the killer in behind the scripts of a submission in steps."""
    points = {
        redis_steps.STAGE: "after-stage",
        redis_steps.COMMIT: "after-commit",
        redis_steps.CARRY: "after-carry",
    }

    def running(script: Any, *values: Any, **options: Any) -> Any:
        reply = run(script, *values, **options)
        killer.reach(points.get(script, ""))
        return reply

    return running


def kill_in_turns() -> None:
    """Let the killer in before and after the transaction of a transaction that settles or fires."""
    from machinery_py.connections.rabbitmq.queue_records import QueueTransaction

    commit = QueueTransaction.commit

    def killing_commit(transaction: QueueTransaction, then: Callable[[], object]) -> None:
        if getattr(killer.inside, "step", ""):
            killer.reach("tx-before-end")
        commit(transaction, then)
        if getattr(killer.inside, "step", ""):
            killer.reach("tx-after-end")

    QueueTransaction.commit = killing_commit  # type: ignore[method-assign]


def killing_step(step: Callable[..., Any], point: str) -> Callable[..., Any]:
    def run(what: Any, **options: Any) -> Any:
        what = list(what)
        done = step(what, **options)
        if what and getattr(killer.inside, "step", ""):
            killer.reach(point)
        return done

    return run


class KillingSession(Session):
    """The real session, in the same way."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.consumer)
        self._session = session

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deliveries = self._session.receive(limit, timeout, order)
        if deliveries:
            killer.reach("after-claim")
        return deliveries

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        if any(mark.state.state is State.STARTED for mark in marks):
            killer.reach("before-start")
        if settlements:
            killer.reach("before-settle")
            killer.inside.step = "inside-settle"
        try:
            verdicts = self._session.settle(settlements, marks)
        finally:
            killer.inside.step = ""
        if marks:
            killer.reach("after-mark")
        if any(mark.state.state is State.STARTED for mark in marks):
            killer.reach("after-start")
        if settlements:
            killer.reach("after-settle")
        return verdicts

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        step = "".join(keeping.rows).partition(":")[2]
        killer.reach(f"before-{step}")
        killer.inside.step = f"inside-{step}"
        try:
            verdict = self._session.keep(delivery, keeping)
        finally:
            killer.inside.step = ""
        killer.reach(f"after-{step}")
        return verdict

    def beat(self) -> bool:
        return self._session.beat()

    def close(self) -> None:
        self._session.close()


class KillingTransaction(StoreTransaction):
    """The real transaction of a step, with points around its last write, and behind the commit."""

    def __init__(self, transaction: StoreTransaction) -> None:
        self._transaction = transaction
        self.own = transaction.own
        self.store = transaction.store

    def settle(self, session: Session, settlement: Settlement) -> Verdict:
        assert isinstance(session, KillingSession)
        return self._transaction.settle(session._session, settlement)

    def keep(self, session: Session, delivery: Delivery, keeping: Keeping) -> Verdict:
        assert isinstance(session, KillingSession)
        step = "".join(keeping.rows).partition(":")[2]
        killer.reach(f"before-{step}")
        verdict = self._transaction.keep(session._session, delivery, keeping)
        killer.reach(f"inside-{step}")
        self.own.commit = around("", self.own.commit, f"after-{step}")  # type: ignore[method-assign]
        return verdict

    def is_held(self, session: Session, delivery: Delivery) -> bool:
        assert isinstance(session, KillingSession)
        return self._transaction.is_held(session._session, delivery)


class KillingStores:
    """What the app asks for its store."""

    def __init__(self, stores: Any) -> None:
        self._stores = stores
        self.store = KillingStore(stores.store)
        self.clock = stores.clock
        self.lock = None

    def close(self) -> None:
        self._stores.close()


WRITES = frozenset({"insert", "update", "delete", "findAndModify"})


class WriteListener(monitoring.CommandListener):
    """Reaches a point at the commands that write to MongoDB, which are counted from `arm` on."""

    def __init__(self) -> None:
        self._armed = False
        self._number = 0
        self._numbers: dict[int, int] = {}
        self._counting = threading.Lock()

    def arm(self) -> None:
        self._armed = True

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if not self._armed or event.command_name not in WRITES:
            return
        with self._counting:
            self._number += 1
            number = self._numbers[event.request_id] = self._number
        killer.reach(f"write-{number}-before")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if number := self._numbers.get(event.request_id):
            killer.reach(f"write-{number}-after")

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass


def main(command: str, *words: str) -> int:
    *what, point = words
    killer.point = point
    if point.startswith("write"):
        listener = WriteListener()
        monitoring.register(listener)
        server.app.store.tend()  # the connection and the indexes are made
        listener.arm()
    else:
        server.app.swap(server.config, server.clock, KillingStores(server.app.stores))  # type: ignore[arg-type]
    match command:
        case "send":
            server.send(SHAPES[what[0]]())
        case "unique":
            server.send(alone.signature(what[0]))
        case "signal":
            server.signal(what[0], "go", 7, key="once")
        case "revoke":
            server.revoke(what)
        case _:
            return server.new_worker(concurrency=2, burst=True).launch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
