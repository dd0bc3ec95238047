"""server.inspect: what is seen, and what is done about it."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from machinery_py import (
    MachineryError,
    NoRetry,
    RetryTaskLater,
    Server,
    Signature,
    State,
    StateNotFound,
    current_task,
)
from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.inspection.calls import calls_of
from machinery_py.rows.contract import Facts, Key, Write
from machinery_py.rows.messages import MessageStep
from machinery_py.tasks.signature import HEADER_ATTEMPT, HEADER_LOST, HEADER_LOST_HOW, UNLIMITED
from machinery_py.tasks.states import ZERO_TIME
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.bodies import encode
from machinery_py.wire.signatures import encode_signature
from tests.support.apps import Bench, bench

__all__ = ["bench"]


def put_bytes(bench: Bench, *bodies: bytes) -> None:
    messages = [Message(uuid="", name="", queue="machinery_tasks", body=body) for body in bodies]
    bench.server.broker.put(messages, token="")


# Queues and workers


def test_queues_are_counted(bench: Bench) -> None:
    bench.add.send(1, 1)
    bench.fail.send("x")
    bench.drain()
    put_bytes(bench, b"{")
    bench.drain()
    bench.add.send(1, 1)
    bench.add.options(delay=60).send(1, 1)
    bench.add.options(queue="mail").send(1, 1)
    bench.harness.clock.advance(2.0)

    main, mail = bench.server.inspect.queues()
    assert (mail.queue, mail.waiting, mail.delayed, mail.running, mail.dead, mail.failed) == (
        "mail",
        1,
        0,
        0,
        0,
        0,
    )
    assert (main.queue, main.waiting, main.delayed, main.dead, main.failed, main.per_minute) == (
        "machinery_tasks",
        1,
        1,
        1,
        1,
        2,
    )
    assert main.oldest == 2.0
    bench.harness.advance(minutes=2)
    assert bench.server.inspect.queues()[0].per_minute == 0


def test_workers_are_listed_while_they_live(bench: Bench) -> None:
    assert bench.server.inspect.workers() == []
    session = bench.server.app.store.open_session(["a", "b"], worker="ada")
    (worker,) = bench.server.inspect.workers()
    assert (worker.name, tuple(worker.queues), worker.holding) == ("ada", ("a", "b"), 0)
    session.close()
    assert bench.server.inspect.workers() == []


def test_a_queue_can_be_emptied(bench: Bench) -> None:
    for _ in range(3):
        bench.add.send(1, 1)
    bench.add.options(delay=60).send(1, 1)
    bench.add.options(queue="mail").send(1, 1)
    assert bench.server.inspect.purge("machinery_tasks") == 4
    assert bench.drain() == 1


# Tasks


def test_tasks_are_found_by_state_name_time_and_queue(bench: Bench) -> None:
    bench.add.send(1, 1)
    bench.fail.send("old")
    bench.drain()
    bench.harness.advance(minutes=10)
    failed = bench.fail.send("new")
    bench.drain()
    waiting = bench.add.send(2, 2)
    mail = bench.note.options(queue="mail").send()

    inspect = bench.server.inspect
    assert [one.task_uuid for one in inspect.tasks()][:2] == [mail.uuid, waiting.uuid]
    assert len(inspect.tasks(limit=2)) == 2
    assert {one.error for one in inspect.tasks(state="failure")} == {"old", "new"}
    assert [one.task_uuid for one in inspect.tasks(state=State.FAILURE, since=60)] == [failed.uuid]
    since = bench.server.now() - dt.timedelta(minutes=1)
    assert [one.task_uuid for one in inspect.tasks(state="FAILURE", since=since)] == [failed.uuid]
    assert {one.task_name for one in inspect.tasks(name="add")} == {"add"}
    assert [one.task_uuid for one in inspect.tasks(queue="mail")] == [mail.uuid]
    assert [one.task_uuid for one in inspect.tasks(queue="mail", name="note")] == [mail.uuid]
    assert inspect.tasks(queue="mail", name="add") == []


def test_unambiguous_start_of_a_uuid_is_enough(bench: Bench) -> None:
    bench.add.options(uuid="task_aaa").send(1, 1)
    bench.add.options(uuid="task_aab").send(1, 1)
    bench.add.options(uuid="task_aab-2").send(1, 1)
    inspect = bench.server.inspect
    assert inspect.find("task_aaa") == "task_aaa"
    assert inspect.find("task_aab") == "task_aab"
    with pytest.raises(MachineryError, match=r"several tasks begin with 'task_a'"):
        inspect.find("task_a")
    with pytest.raises(StateNotFound):
        inspect.find("task_zzz")


def test_waiting_or_failed_task_is_shown_with_its_signature(bench: Bench) -> None:
    waiting = bench.add.send(1, 2)
    delayed = bench.add.options(delay=60).send(3, 4)
    failed = bench.fail.send("x")
    for result, args in ((waiting, [1, 2]), (delayed, [3, 4]), (failed, ["x"])):
        report = bench.server.inspect.task(result.uuid)
        assert report.signature is not None
        assert [arg.value for arg in report.signature.args] == args
    bench.drain()
    assert bench.server.inspect.task(waiting.uuid).signature is None
    report = bench.server.inspect.task(failed.uuid)
    assert report.signature is not None
    assert (report.state.state, report.signature.name) == (State.FAILURE, "fail")


# Retrying


def test_failed_tasks_are_sent_again_as_they_were(bench: Bench) -> None:
    broken = [True]

    @bench.server.task(retries=1, backoff=[0])
    def fragile(value: int) -> int:
        if broken:
            raise ConnectionError("away")
        return value

    result = fragile.signature(5).then(bench.note.partial("then")).send()
    bench.drain()
    bench.drain()
    assert bench.server.result(result.uuid).get_state().state is State.FAILURE
    broken.clear()

    assert bench.server.inspect.retry(name="fragile") == [result.uuid]
    assert bench.server.result(result.uuid).get_state().state is State.PENDING
    bench.drain()
    assert bench.server.result(result.uuid).get(timeout=0) == 5
    assert bench.calls == [("then", 5)]


def test_retry_sends_a_task_without_limit_as_before_its_first_try(bench: Bench) -> None:
    tries: list[int] = []

    @bench.server.task(retries=None, backoff=[0.0])
    def stubborn() -> None:
        tries.append(current_task().attempt)
        if len(tries) == 1:
            raise RetryTaskLater("busy", 0.0)
        raise ValueError("away") if len(tries) < 4 else NoRetry("useless")

    result = stubborn.send()
    bench.drain()
    failed = bench.server.inspect.task(result.uuid).signature
    bench.server.inspect.retry([result.uuid])
    [again] = bench.server.broker.get_pending_tasks()

    assert tries == [1, 1, 2, 3]
    assert failed is not None
    assert failed.retry_count == again.retry_count == UNLIMITED
    assert (failed.postponed, failed.attempt, again.headers) == (1, 3, {})


def test_failed_dead_letter_is_sent_as_before_its_first_try(bench: Bench) -> None:
    tries: list[int] = []

    @bench.server.task(retries=1, backoff=[0.0], on_failure="dead_letter")
    def fragile() -> int:
        tries.append(current_task().attempt)
        if len(tries) < 4:
            raise ValueError("away")
        return len(tries)

    result = fragile.send()
    bench.drain()
    [letter] = bench.server.inspect.dead()
    bench.server.inspect.replay_dead([letter.id])
    bench.drain()

    assert tries == [1, 2, 1, 2]
    assert result.get(timeout=0) == 4


@pytest.mark.parametrize("tries", [0, UNLIMITED, 2**63 - 1])
def test_replayed_task_has_no_strikes_of_its_processes(bench: Bench, tries: int) -> None:
    headers = {HEADER_LOST: "3", HEADER_ATTEMPT: "999999999"}
    struck = bench.add.signature(1, 2).with_uuid().replace(retry_count=tries, headers=headers)
    bench.server.send_task(struck)
    bench.drain()
    [letter] = bench.server.inspect.dead()
    bench.server.inspect.replay_dead([letter.id])
    bench.drain()

    assert letter.reason == "poison"
    assert bench.server.result(struck.uuid).get(timeout=0) == 3


@pytest.mark.parametrize(
    ("how", "text"),
    [(b"[1]", "its worker was lost"), (b'"%s"' % (b"x" * 10**6), r"x{100,200}… .*")],
    ids=["no text", "long"],
)
def test_poison_quotes_a_short_text_alone(bench: Bench, how: bytes, text: str) -> None:
    """Of what stands in the header, which comes from the wire."""
    struck = bench.add.signature(1, 2).with_uuid()
    struck = struck.with_headers(**{HEADER_LOST: "3", HEADER_LOST_HOW: "HOW"})
    body = encode_signature(struck).replace(b'"HOW"', how)
    message = Message(uuid=struck.uuid, name=struck.name, queue="machinery_tasks", body=body)
    bench.server.broker.put([message], token="")
    bench.drain()

    [letter] = bench.server.inspect.dead()
    assert re.match(rf"{text}, 3 times while it ran", letter.error)


def test_which_are_retried_can_be_chosen(bench: Bench) -> None:
    one, two, good = bench.fail.send("1"), bench.fail.send("2"), bench.add.send(1, 1)
    bench.drain()
    inspect = bench.server.inspect
    assert inspect.retry([one.uuid, good.uuid, "task_unheard-of"]) == [one.uuid]
    assert inspect.retry(name="add") == []
    bench.harness.advance(seconds=5)
    assert inspect.retry(since=1.0) == []
    assert inspect.retry() == [two.uuid]
    assert bench.drain() == 2


def test_a_retried_task_that_fails_again_can_be_retried_again(bench: Bench) -> None:
    result = bench.fail.send("x")
    for _ in range(3):
        assert bench.drain() == 1
        assert bench.server.inspect.retry() == [result.uuid]


# Dead letters


def test_dead_letters_are_listed_found_and_deleted(bench: Bench) -> None:
    put_bytes(bench, b"{", b"[]")
    bench.drain()
    inspect = bench.server.inspect
    newest, oldest = inspect.dead()
    assert (newest.body, oldest.body, oldest.reason) == (b"[]", b"{", "undecodable")
    assert inspect.dead(limit=1) == [newest]
    assert inspect.dead(queue="mail") == []
    assert inspect.dead_letter(oldest.id[:8]) == oldest
    with pytest.raises(StateNotFound):
        inspect.dead_letter("zzz")
    assert inspect.delete_dead([oldest.id]) == 1
    assert inspect.dead() == [newest]


def test_whole_id_goes_before_the_start_of_a_newer_one(tmp_path: Path) -> None:
    server = Server(f"sqlite:///{tmp_path}/m.db")
    assert isinstance(server.broker, SQLiteBroker)
    for number in range(1, 13):
        letter = DeadLetter(
            id=str(number), uuid="", name="", queue="mail", body=b"{", reason="", died_at=ZERO_TIME
        )
        write = Write(body=encode(letter), facts=Facts(at=number, name="mail"))
        server.broker.rows.commit([MessageStep(write={Key("dead", letter.id): write})])
    ids = [one.id for one in server.inspect.dead()]

    assert ids == [str(number) for number in range(12, 0, -1)]
    assert server.inspect.dead_letter("1").id == "1"
    assert server.inspect.delete_dead(["1", "12"]) == 2
    assert [one.id for one in server.inspect.dead()] == [id for id in ids if id not in ("1", "12")]


def test_a_dead_letter_can_be_replayed(bench: Bench) -> None:
    server = bench.server
    result = server.send_task(Signature.of("rare", 20, 22))
    for _ in range(200):
        bench.drain()
        if server.inspect.dead():
            break
        bench.harness.advance(minutes=1)
    (letter,) = server.inspect.dead()
    assert (letter.reason, letter.uuid, letter.name) == ("unregistered", result.uuid, "rare")
    assert result.get_state().state is State.FAILURE

    server.register_task("rare", lambda a, b: a + b)
    assert server.inspect.replay_dead([letter.id]) == [result.uuid]
    assert server.inspect.dead() == []
    bench.drain()
    assert server.result(result.uuid).get(timeout=0) == 42


def test_dead_letter_that_cannot_run_stays_dead(bench: Bench) -> None:
    put_bytes(bench, b"{")
    bench.drain()
    (letter,) = bench.server.inspect.dead()
    assert bench.server.inspect.replay_dead([letter.id]) == []
    assert bench.server.inspect.dead() == [letter]


def test_inspection_works_beside_a_running_worker() -> None:
    bench = Bench()
    with bench.server.new_worker(concurrency=2):
        bench.add.send(1, 1).get(timeout=HANG)
        assert bench.server.inspect.queues()[0].queue == "machinery_tasks"
        assert len(bench.server.inspect.workers()) == 1
        assert [one.state for one in bench.server.inspect.tasks(name="add")] == [State.SUCCESS]
    bench.server.close()


# What tasks were called with


def test_arguments_of_tasks_that_wait_or_have_failed_are_known(bench: Bench) -> None:
    failed, done = bench.fail.send("x"), bench.add.send(1, 2)
    bench.drain()
    waits, later = bench.add.send(3, 4), bench.add.options(delay=60).send(5, 6)
    inspect = bench.server.inspect

    assert calls_of(inspect.tasks()).keys() == {failed.uuid}
    assert inspect.task(done.uuid).args is None
    for result, values in ((failed, ["x"]), (waits, [3, 4]), (later, [5, 6])):
        assert [one.value for one in inspect.task(result.uuid).args or ()] == values


def test_calls_that_are_kept_are_found(bench: Bench) -> None:
    bench.server.app.publisher.enable()
    done, other = bench.add.send(1, 217), bench.add.send(1, 2)
    bench.drain()
    inspect = bench.server.inspect

    assert [one.value for one in inspect.task(done.uuid).args or ()] == [1, 217]
    assert [one.task_uuid for one in inspect.tasks(text="217")] == [done.uuid]
    assert calls_of(inspect.tasks()).keys() == {done.uuid, other.uuid}
    assert not inspect.retry([done.uuid])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


def test_worker_is_asked_for_the_arguments_of_what_it_runs(server: Server) -> None:
    begun, gate = threading.Event(), threading.Event()

    @server.task
    def slow(number: int, text: str) -> None:
        begun.set()
        gate.wait(HANG)

    with server.new_worker():
        result, large = slow.send(7, "short"), slow.send(8, "x" * 3_000)
        begun.wait(HANG)
        wait_until(
            lambda: {one.get_state().state for one in (result, large)} == {State.STARTED},
            what="their start",
        )
        assert server.inspect.task(result.uuid).args is None
        args = server.inspect.task(result.uuid, ask=True).args
        assert [one.value for one in args or ()] == [7, "short"]
        assert server.inspect.task(large.uuid, ask=True).args is None
        gate.set()


def test_worker_of_many_tasks_says_as_many_arguments_as_an_answer_holds(server: Server) -> None:
    gate = asyncio.Event()

    @server.task
    async def slow(text: str) -> None:
        await gate.wait()

    with server.new_worker(concurrency=60):
        sent = [slow.send(secrets.token_hex(700)) for _ in range(60)]
        wait_until(
            lambda: {one.get_state().state for one in sent} == {State.STARTED}, what="all of them"
        )
        [active] = server.control.workers().active().values()
        for one in sent:
            server.revoke(one.uuid)
        server.control.workers().terminate(*(one.uuid for one in sent))
    assert len(active) == 60
    assert 15 <= sum(one.args is not None for one in active) < 25


def test_secrets_are_not_kept(server: Server) -> None:
    server.app.publisher.enable()

    @server.task
    def login(user: str, password: SecretStr) -> None: ...

    with server.new_worker():
        result = login.send("ann", SecretStr("hunter2"))
        result.get(timeout=HANG)
    assert result.get_state().message == b""
