"""What signals meet beside their own protocol: locks, revocation, retry, hostile timers."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from machinery_py import (
    Config,
    Server,
    State,
    TaskFailed,
    Unsupported,
    chain,
    current_task,
    group,
    signals,
)
from machinery_py.backends.base import Verdict
from machinery_py.brokers.base import Message
from machinery_py.errors import BackendUnavailable, NameRefused, SignalRefused, SignalTimeout
from machinery_py.events import Event, TaskRejected, TaskSent, TaskSuspended
from machinery_py.stores.base import Mark, Settlement
from machinery_py.stores.rows import RowsSession
from machinery_py.tasks import mailboxes
from machinery_py.tasks.mailboxes import FAILED, RESULT, TIMER, brings_result, brought_to
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.testing import Harness
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.texts import MAX_ERROR
from machinery_py.wire.signatures import decode_signature, encode_signature
from machinery_py.worker.loops import settler
from machinery_py.worker.running import checkpoints


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Config(broker="memory://"))
    yield server
    server.close()


def waits(server: Server, result: Any) -> None:
    wait_until(lambda: server.inspect.task(result.uuid).waits_for, what="a task that waits")


def test_signal_wakes_a_task_whose_wait_was_put_aside(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PostgreSQL does it where somebody else's transaction has locked what changes."""
    monkeypatch.setattr(settler, "ASIDE", (0.05, 0.1))
    blocked, settle = threading.Semaphore(2), RowsSession.settle
    is_aside = threading.Event()

    def settle_late(
        session: RowsSession, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        if any(one.riders for one in settlements):
            if blocked.acquire(blocking=False):
                error = BackendUnavailable("somebody has locked it")
                error.blocked = True
                raise error
            is_aside.set()
            signalled.wait(HANG)
        return settle(session, settlements, marks)

    monkeypatch.setattr(RowsSession, "settle", settle_late)
    signalled = threading.Event()

    @server.task
    def flow() -> Any:
        return current_task().wait_for("approval")

    with server.new_worker():
        result = flow.send()
        is_aside.wait(HANG)
        assert server.signal(result.uuid, "approval", 7)
        signalled.set()
        assert result.get(timeout=HANG) == 7


@pytest.mark.parametrize("_", range(5))
def test_task_that_was_revoked_before_it_waits_fails(server: Server, _: int) -> None:
    gate, begun = threading.Event(), threading.Event()

    @server.task
    def flow() -> Any:
        begun.set()
        gate.wait(HANG)
        return current_task().wait_for("approval")

    with server.new_worker():
        result = flow.send()
        begun.wait(HANG)
        server.revoke(result.uuid)
        gate.set()
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)


def test_task_that_suspends_while_it_is_revoked_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked for its revocation before that was there."""
    monkeypatch.setattr(settler, "end_if_revoked", lambda *_: None)
    gate, begun = threading.Event(), threading.Event()

    @server.task
    def flow() -> Any:
        begun.set()
        gate.wait(HANG)
        return current_task().wait_for("approval")

    backend = server.app.store.backend
    revoke = backend.revoke

    def revoke_late(*words: Any) -> None:
        gate.set()
        waits(server, result)
        revoke(*words)

    with server.new_worker():
        result = flow.send()
        begun.wait(HANG)
        wait_until(lambda: result.get_state().state is State.STARTED, what="the start")
        with monkeypatch.context() as patch:
            patch.setattr(backend, "revoke", revoke_late)
            server.revoke(result.uuid)
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)


def test_signals_outlive_a_failure_that_is_retried(server: Server) -> None:
    fails = [True]

    @server.task
    def flow() -> list[Any]:
        task = current_task()
        found = [task.wait_for("a")]
        if fails:
            raise OSError("no")
        task.sleep(dt.timedelta(hours=30))
        return [*found, task.wait_for("a"), task.wait_for("a")]

    with Harness(server) as machinery:
        result = flow.send()
        for number in (1, 2):
            server.signal(result.uuid, "a", number)
        machinery.drain(raise_failures=False)
        fails.clear()
        machinery.advance(minutes=10)
        assert server.inspect.retry([result.uuid])
        machinery.drain()
        machinery.advance(hours=29)
        server.signal(result.uuid, "a", 3)
        machinery.advance(hours=1)
        machinery.drain()
        assert result.touch() == [1, 2, 3]


def test_record_that_was_lost_loses_no_later_signal(server: Server) -> None:
    backend, gate = server.app.store.backend, threading.Event()

    @server.task
    def flow() -> list[Any]:
        task = current_task()
        found = [task.wait_for("a")]
        gate.wait(HANG)
        return [*found, task.wait_for("a")]

    with server.new_worker():
        again = flow.send()
        server.signal(again.uuid, "a", 1)
        wait_until(lambda: server.inspect.task(again.uuid).steps, what="what it has read")
        name = mailboxes.record_of(again.uuid)
        backend.release([(name, body) for body in backend.claims([name]) if body is not None])
        assert server.signal(again.uuid, "a", 2)
        gate.set()
        assert again.get(timeout=HANG) == [1, 2]


def test_waits_are_bounded_as_steps_are(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINTS", 4)

    @server.task
    def flow() -> None:
        for _ in range(6):
            current_task().wait_for("a")

    with server.new_worker():
        result = flow.send()
        for number in range(6):
            server.signal(result.uuid, "a", number)
        with pytest.raises(TaskFailed, match="the task has 4 checkpoints"):
            result.get(timeout=HANG)


def test_signals_that_were_read_leave_their_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailboxes, "MOST_SIGNALS", 2)
    gates = [threading.Event() for _ in range(2)]

    @server.task
    def flow() -> list[Any]:
        task = current_task()
        found = [task.wait_for("a"), task.wait_for("a")]
        gates[0].set()
        gates[1].wait(HANG)
        return [*found, task.wait_for("a")]

    result = flow.send()
    for number in (1, 2):
        server.signal(result.uuid, "a", number)
    with pytest.raises(SignalRefused, match="2 unread signals"):
        server.signal(result.uuid, "a", 3)
    with server.new_worker():
        gates[0].wait(HANG)
        assert server.signal(result.uuid, "a", 3)
        gates[1].set()
        assert result.get(timeout=HANG) == [1, 2, 3]


def test_step_may_not_be_named_like_a_wait(server: Server) -> None:
    @server.task(retries=0)
    def flow(name: str) -> None:
        current_task().step(name, int, 7)

    with server.new_worker():
        for name in ("wait for approval", "deadline approval", "result of a", "sleep"):
            with pytest.raises(TaskFailed, match="choose another name"):
                flow.send(name).get(timeout=HANG)


def test_timer_ends_its_wait_and_is_nothing_else(server: Server) -> None:
    seen: list[Event] = []
    for kind in (TaskRejected, TaskSuspended):
        server.events.subscribe(kind, seen.append)

    @server.task
    def flow() -> str:
        try:
            return str(current_task().wait_for("approval", timeout=0.5))
        except SignalTimeout as error:
            return str(error)

    with server.new_worker():
        result = flow.send()
        waits(server, result)
        [timer] = server.broker.delayed(10)
        server.revoke(timer.uuid)  # it is no task, and counts all the same
        assert result.get(timeout=HANG) == "signal 'approval' did not come in time"
    assert [type(one) for one in seen] == [TaskSuspended]


def test_purge_ends_a_waiting_task_beside_an_old_timer_of_its_own(server: Server) -> None:
    @server.task
    def flow() -> None:
        task = current_task()
        task.wait_for("a", timeout=dt.timedelta(days=7))
        task.wait_for("b", timeout=dt.timedelta(days=1))

    queue = server.config.default_queue
    with server.new_worker():
        result = flow.send()
        waits(server, result)
        server.signal(result.uuid, "a")
        wait_until(
            lambda: server.inspect.task(result.uuid).waits_for == "b", what="the second wait"
        )
        assert server.inspect.purge(queue) == 2
        with pytest.raises(TaskFailed, match="deleted from its queue"):
            result.get(timeout=HANG)


def test_message_that_is_no_timer_is_purged(server: Server) -> None:
    queue = server.config.default_queue
    for body in (b"no JSON", b"{}"):
        server.broker.put([Message(uuid="u", name=TIMER, queue=queue, body=body)], token="")
    assert server.inspect.purge(queue) == 2


def test_worker_outlives_a_hook_that_fails_when_a_waiting_task_is_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of a hook")

    monkeypatch.setattr(settler, "end_if_revoked", fail)

    @server.task
    def flow() -> Any:
        return current_task().wait_for("approval")

    with server.new_worker():
        result = flow.send()
        waits(server, result)
        server.signal(result.uuid, "approval", 7)
        assert result.get(timeout=HANG) == 7


@pytest.mark.parametrize("name", [TIMER, RESULT, FAILED])
def test_names_of_what_ends_a_wait_are_taken(server: Server, name: str) -> None:
    with pytest.raises(NameRefused, match="the library's own"):
        server.register_task(name, print)


def test_task_waits_for_no_sent_task(server: Server) -> None:
    @server.task
    def add(a: int) -> int:
        return a

    @server.task(retries=0)
    def flow(how: str) -> None:
        if how == "sent":
            current_task().wait_for(add.send(1))  # type: ignore[call-overload]
        elif how == "named":
            current_task().wait_for(add.options(uuid="mine").signature(1))
        elif how == "inside":
            current_task().wait_for(group(add.options(uuid="mine").signature(1)) | add.partial())
        else:
            current_task().wait_for(add.options(unique=True).signature(1))

    with server.new_worker():
        for how, text in (
            ("sent", r"its signature, which this sends"),
            ("named", "add has a UUID, mine"),
            ("unique", "add has options"),
            ("inside", "add has a UUID, mine"),
        ):
            with pytest.raises(TaskFailed, match=text):
                flow.send(how).get(timeout=HANG)


def test_result_that_the_broker_refuses_ends_the_wait(server: Server) -> None:
    uuid = "task_00000000-0000-4000-8000-000000000000"
    result, _ = brings_result(uuid, "#0 result of add", "machinery_tasks")
    message = server.app.message(result.with_args(after=[Arg(type="int64", value=7)]).with_uuid())
    refusal = server.app.refusal(message, ValueError("too large"))

    [sent] = map(decode_signature, (one.body for one in refusal.send))
    assert sent.name == FAILED
    assert brought_to(sent) == (uuid, "#0 result of add")
    assert sent.args[0].value == "it cannot be sent: too large"
    assert [one.task_name for one in refusal.states] == [RESULT]


def test_hook_before_sending_does_not_see_how_a_result_travels(server: Server) -> None:
    seen: list[str] = []

    def look(signature: Signature[Any]) -> Signature[Any] | None:
        seen.append(signature.name)
        return signature.replace(routing_key="") if signature.name.startswith("mach") else None

    server.set_pre_publish_handler(look)

    @server.task
    def add(a: int) -> int:
        return a

    @server.task
    def flow() -> int:
        return current_task().wait_for(add.signature(1))

    with server.new_worker():
        assert flow.send().get(timeout=HANG) == 1
    assert set(seen) == {"flow", "add"}


def test_key_of_a_user_is_no_result(server: Server) -> None:
    @server.task
    def add(a: int) -> int:
        return a

    @server.task
    def flow() -> list[Any]:
        task = current_task()
        return [task.wait_for("go"), task.wait_for(add.signature(1))]

    with server.new_worker():
        result = flow.send()
        server.signal(result.uuid, "go", 7, key="#0 result of add")
        assert result.get(timeout=HANG) == [7, 1]


def test_result_of_an_immutable_step_travels_as_any_other(server: Server) -> None:
    """A worker of Go passes no result of an immutable task on."""

    @server.task
    def add(a: int) -> int:
        return a

    @server.task
    def flow() -> int:
        return current_task().wait_for(chain(add.signature(1), pass_results=False))

    sent: list[Signature[Any]] = []
    server.events.subscribe(TaskSent, lambda event: sent.append(event.signature))
    with server.new_worker():
        assert flow.send().get(timeout=HANG) == 1
    [child] = [one for one in sent if one.name == "add"]
    assert not child.immutable
    assert [one.name for one in sent] == ["flow", "add"]


def test_result_that_meets_the_suspension_keeps_its_value(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task waits between the look of what brings the result, and its change."""

    @server.task(ignore_result=True)
    def add(a: int) -> int:
        return a

    @server.task
    def flow() -> Any:
        return current_task().wait_for(add.signature(7))

    look, hidden = signals._mailbox, [True]

    def look_early(app: Any, uuid: str) -> tuple[bytes | None, mailboxes.Mailbox]:
        body, box = look(app, uuid)
        if hidden and box.wait is not None and box.wait.child:
            hidden.clear()  # as it was before the task waited: its change is refused
            return b"older", mailboxes.without_wait(box)
        return body, box

    monkeypatch.setattr(signals, "_mailbox", look_early)
    with server.new_worker():
        assert flow.send().get(timeout=HANG) == 7
    assert not hidden


def test_text_of_a_failure_is_bounded(server: Server) -> None:
    @server.task
    def flow() -> str:
        task = current_task()
        try:
            task.wait_for(Signature(name="go.task", routing_key="of Go"))
        except TaskFailed as error:
            return task.step("after", str, len(error.error))
        return ""

    with server.new_worker():
        result = flow.send()
        wait_until(lambda: "waits for" in result.get_state().error, what="the wait")
        _, failure = brings_result(result.uuid, "#0 result of go.task", "machinery_tasks")
        server.send(failure.with_args(before=[Arg(type="string", value="x" * 2**21)]))
        assert int(result.get(timeout=HANG)) <= MAX_ERROR


def test_task_that_no_worker_knows_ends_the_wait() -> None:
    server = Server(Config(broker="memory://", unregistered_timeout=1.0))

    @server.task(retries=0)
    def flow() -> Any:
        return current_task().wait_for(Signature(name="of another program"))

    with Harness(server) as machinery:
        result = flow.send()
        for _ in range(3):
            machinery.drain(raise_failures=False)
            machinery.advance(minutes=1)
        with pytest.raises(TaskFailed, match="task 'of another program' is not registered"):
            result.touch()


@pytest.mark.parametrize("how", ["sleep", "wait", "wait for a while"])
def test_key_of_a_suspended_task_is_its_own_until_the_end(server: Server, how: str) -> None:
    month = dt.timedelta(days=30)

    @server.task(unique=True)
    def flow() -> Any:
        task = current_task()
        if how == "sleep":
            return task.sleep(month)
        return task.wait_for("go", timeout=None if how == "wait" else month)

    with Harness(server) as machinery:
        result = flow.send()
        machinery.drain()
        machinery.advance(days=29)
        assert flow.send().uuid == result.uuid
        machinery.advance(days=1)
        server.signal(result.uuid, "go") if how == "wait" else None
        machinery.drain(raise_failures=False)
        assert flow.send().uuid != result.uuid


def test_waits_take_no_time_where_tasks_run_at_once() -> None:
    server = Server(Config(broker="eager"))

    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    @server.task
    def flow() -> list[int]:
        task = current_task()
        return [task.wait_for(add.signature(n, 1), timeout=60) for n in range(2)]

    assert flow.send().get(timeout=HANG) == [1, 2]


@pytest.mark.parametrize(
    ("uuid", "args"),
    [
        ("task_1", [Arg(type="string", value="task_2")]),
        ("timer_1", [Arg(type="string", value="")]),
        ("timer_1", [Arg(type="json", value={"a": 1})]),
        ("timer_1", []),
    ],
)
def test_timer_of_a_stranger_is_a_dead_letter(server: Server, uuid: str, args: list[Arg]) -> None:
    queue = server.config.default_queue
    body = encode_signature(Signature(name=TIMER, uuid=uuid, args=args, routing_key=queue))
    server.broker.put([Message(uuid=uuid, name=TIMER, queue=queue, body=body)], token="")
    with server.new_worker():
        wait_until(server.inspect.dead, what="the dead letter")
    [letter] = server.inspect.dead()
    assert "no task of yours" in letter.error


def test_timer_of_an_unknown_task_does_nothing(server: Server) -> None:
    @server.task
    def add(a: int) -> int:
        return a

    queue = server.config.default_queue
    for value in ("a\x00b", "x" * 300_000, "machinery_tasks", "task_unheard-of"):
        args = [Arg(type="string", value=value)]
        body = encode_signature(Signature(name=TIMER, uuid="timer_1", args=args, routing_key=queue))
        server.broker.put([Message(uuid="timer_1", name=TIMER, queue=queue, body=body)], token="")
    with server.new_worker():
        assert add.send(3).get(timeout=HANG) == 3
        wait_until(lambda: not server.broker.pending(queue, 10), what="an empty queue")


def test_signal_in_a_transaction_is_refused(server: Server) -> None:
    with server.transaction(object()), pytest.raises(Unsupported, match="behind the block"):
        server.signal("task_1", "approval")
