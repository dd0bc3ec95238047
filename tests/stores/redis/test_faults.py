"""Refused, forgotten and cut-off commands of a real Redis."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machinery_py import Config, Server
from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Change
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.brokers.base import Disposal, Fate, Message
from machinery_py.brokers.redis import broker as redis
from machinery_py.brokers.redis import consumer as redis_consumer
from machinery_py.brokers.redis import scripts as broker_scripts
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.errors import (
    BrokerUnavailable,
    MachineryError,
    NameRefused,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.stores.base import Session, Settlement, Submission
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import State, TaskState, advance
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def driver(server: RedisServer) -> Iterator[RedisDriver]:
    driver = RedisDriver(server.url)
    yield driver
    driver.close()


def ask(driver: RedisDriver, *words: str) -> Any:
    return driver.ask(*(word.encode() for word in words), doing="testing")


def message(uuid: str = "task_1", body: bytes = b"x") -> Message:
    return Message(uuid=uuid, name="add", queue="mail", body=body)


def store(driver: RedisDriver) -> RedisStore:
    return RedisStore(RedisBroker(driver), RedisBackend(driver))


def done(delivery: Any, uuid: str = "task_1") -> Settlement:
    state = TaskState(task_uuid=uuid, task_name="add", state=State.SUCCESS, queue="mail")
    return Settlement(delivery=delivery, uuid=uuid, name="add", states=(state,))


def test_the_scripts_and_states_py_say_the_same(driver: RedisDriver) -> None:
    backend = RedisBackend(driver)
    for before in State:
        for after in State:
            for run in (0, 1, 2):
                uuid = f"task_{before}{after}{run}"
                first, second = (
                    TaskState(task_uuid=uuid, state=before, run=1),
                    TaskState(task_uuid=uuid, state=after, run=run),
                )
                backend.apply([Change(key=uuid, states=(first,))])
                (verdict,) = backend.apply([Change(key=uuid, mark="m", states=(second,))])
                assert verdict == (FENCED if advance(first, second) is None else SETTLED), (
                    before,
                    after,
                    run,
                )


def test_a_server_that_is_away_refuses(server: RedisServer, driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    broker.put([message()], token="a")
    server.stop()

    with pytest.raises(BrokerUnavailable, match="publishing"):
        broker.put([message()], token="b")


def test_lost_reply_differs_from_a_refusal_and_can_be_repeated(
    server: RedisServer, driver: RedisDriver
) -> None:
    with Proxy(server.port) as proxy:
        through = RedisDriver(proxy.through(server.url))
        broker = RedisBroker(through)
        broker.put([message()], token="a")
        proxy.drop_next_reply(times=2)

        with pytest.raises(PublishUnknown):
            broker.put([message()], token="b")

        assert broker.put([message()], token="b") is False
        assert ask(driver, "LLEN", "mail") == 2
        through.close()


def test_the_reply_to_a_claim_can_be_lost(server: RedisServer) -> None:
    with Proxy(server.port) as proxy:
        through = RedisDriver(proxy.through(server.url))
        broker = RedisBroker(through)
        consumer = broker.consume(["mail"], worker="w")
        assert consumer.receive(5, 0) == []
        broker.put([message(body=b"1"), message(body=b"2")], token="")
        proxy.drop_next_reply()
        with pytest.raises(BrokerUnavailable):
            consumer.receive(5, 0)

        found = consumer.receive(5, 0)

        assert [delivery.body for delivery in found] == [b"1", b"2"]
        assert consumer.dispose([Disposal(delivery=one) for one in found]) == [True, True]
        consumer.close()
        through.close()


@pytest.mark.parametrize("other", [{"priority": 9}, {"tenant": "t"}])
def test_receipt_of_a_claim_that_a_crash_undid_is_not_given_again(
    server: RedisServer, driver: RedisDriver, other: dict[str, Any]
) -> None:
    """Its run goes on, and its end must not be that of another message."""
    both = store(driver)
    session = both.open_session(["mail"], worker="w")
    both.messages.put([message(f"task_{n}", b"1") for n in range(3)], token="")
    assert server.cli("SAVE") == "OK"
    first = session.receive(3, 0)
    server.kill()
    server.start()
    wait_until(lambda: answers(driver), HANG)
    both.messages.put([msgspec.structs.replace(message("other", b"2"), **other)], token="")

    [second] = received(session)
    assert second.body == b"2"
    assert session.consumer.holds([*first, second]) == [False] * 3 + [True]
    ends = [done(one, f"task_{n}") for n, one in enumerate(first)]
    assert session.settle([*ends, done(second, "other")]) == [FENCED] * 3 + [SETTLED]
    again = session.receive(3, 0)
    ends = [done(one, f"task_{n}") for n, one in enumerate(again)]
    assert session.settle(ends) == [SETTLED] * 3
    session.close()


def test_message_whose_end_a_crash_undid_comes_again(
    server: RedisServer, driver: RedisDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer lives on, so nobody else gives it back."""
    monkeypatch.setattr(redis_consumer, "LOST_LIFE", 0.0)
    both = store(driver)
    session = both.open_session(["mail"], worker="w")
    both.messages.put([message("task_1", b"1"), message("task_2", b"2")], token="")
    first, second = session.receive(2, 0)
    assert server.cli("SAVE") == "OK"
    assert session.settle([done(first, "task_1")]) == [SETTLED]
    server.kill()
    server.start()
    wait_until(lambda: answers(driver), HANG)

    assert received(session) == []
    flight = next(key for key in server.cli("KEYS", "*") if "}:f:" in key)
    server.cli("HSET", flight, "no number", "of nobody")
    assert session.consumer.beat()
    [again] = session.receive(2, 0)
    assert (again.body, again.count) == (b"1", 2)
    assert session.consumer.holds([first, second, again]) == [False, True, True]
    ends = [done(again, "task_1"), done(second, "task_2")]
    assert session.settle(ends) == [SETTLED, SETTLED]
    session.close()


def answers(driver: RedisDriver) -> bool:
    with contextlib.suppress(MachineryError):
        return bool(ask(driver, "PING"))
    return False


def received(session: Session) -> list[Any]:
    """Claim one message; the first try may find that its connection has ended."""
    with contextlib.suppress(BrokerUnavailable):
        return session.receive(1, 0)
    return session.receive(1, 0)


def test_full_server_refuses_messages_and_lets_running_tasks_end(driver: RedisDriver) -> None:
    both = store(driver)
    both.submit(
        Submission(
            token="", messages=[message()], states=[TaskState(task_uuid="task_1", queue="mail")]
        )
    )
    session = both.open_session(["mail"], worker="w")
    (delivery,) = session.receive(1, 0)
    ask(driver, "CONFIG", "SET", "maxmemory", "1mb")
    try:
        with pytest.raises(PublishRefused, match="broker full") as caught:
            both.submit(Submission(token="t", messages=[message()]))
        assert not isinstance(caught.value, BrokerUnavailable)
        assert session.beat() is True
        assert session.settle([done(delivery)]) == [SETTLED]
        assert both.backend.get_state("task_1").state is State.SUCCESS
    finally:
        ask(driver, "CONFIG", "SET", "maxmemory", "0")
    both.submit(Submission(token="t", messages=[message()]))
    assert len(session.receive(5, 0)) == 1
    session.close()


def test_idle_worker_of_a_full_server_does_not_spin(driver: RedisDriver) -> None:
    consumer = RedisBroker(driver).consume(["mail"], worker="w")
    ask(driver, "CONFIG", "SET", "maxmemory", "1mb")
    ask(driver, "CONFIG", "RESETSTAT")
    try:
        assert consumer.receive(1, 0.3) == []
        counted = ask(driver, "INFO", "commandstats").decode()
    finally:
        ask(driver, "CONFIG", "SET", "maxmemory", "0")

    [refused] = re.findall(r"cmdstat_blmove:calls=\d+.*rejected_calls=(\d+)", counted)
    assert 1 <= int(refused) <= 4
    consumer.close()


def test_forgotten_scripts_are_sent_again(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    consumer = broker.consume(["mail"], worker="w")
    for number in range(3):
        ask(driver, "SCRIPT", "FLUSH")
        broker.put([message(body=b"%d" % number)], token="")
        ask(driver, "SCRIPT", "FLUSH")
        (delivery,) = consumer.receive(5, 0)
        ask(driver, "SCRIPT", "FLUSH")
        assert consumer.dispose([Disposal(delivery=delivery)]) == [True]
    consumer.close()


def test_a_key_of_another_type_is_named_and_nothing_is_half_done(driver: RedisDriver) -> None:
    both = store(driver)
    ask(driver, "SET", "mail", "a string")
    with pytest.raises(NameRefused, match="'mail' holds a string"):
        both.submit(
            Submission(token="t", messages=[message()], states=[TaskState(task_uuid="task_1")])
        )
    assert both.backend.get_states(["task_1"]) == {}
    ask(driver, "DEL", "mail")
    both.submit(Submission(token="t", messages=[message()], states=[TaskState(task_uuid="task_1")]))

    session = both.open_session(["mail"], worker="w")
    (delivery,) = session.receive(5, 0)
    ask(driver, "RENAME", "task_1", "elsewhere")
    ask(driver, "RPUSH", "task_1", "a list")
    with pytest.raises(NameRefused, match="'task_1' holds a list"):
        session.settle([done(delivery)])
    ask(driver, "RENAME", "elsewhere", "task_1")
    assert session.settle([done(delivery)]) == [SETTLED]
    session.close()


def test_spoilt_queue_is_left_out_of_listings_and_named(
    driver: RedisDriver, caplog: pytest.LogCaptureFixture
) -> None:
    broker = store(driver).broker
    for queue in ("mail", "news", "old"):
        broker.put([Message(uuid="", name="", queue=queue, body=b"x")], token="")
    for key in ("mail", "mpy:{old}:s"):
        ask(driver, "SET", key, "a string")

    assert [(one.queue, one.waiting) for one in broker.stats()] == [("news", 1)]
    assert broker.workers() == []
    for key in ("mail", "mpy:{old}:s"):
        assert f"counting messages: key '{key}' holds a string" in caplog.text


def test_a_wrong_password_is_fatal_and_not_told(server: RedisServer, driver: RedisDriver) -> None:
    ask(driver, "CONFIG", "SET", "requirepass", "secret")
    try:
        for url in (server.url, server.url.replace("//", "//wrongsecret@")):
            broken = RedisDriver(url)
            with pytest.raises(StoreUnusable) as caught:
                RedisBroker(broken).stats()
            assert "secret" not in str(caught.value)
        right = RedisDriver(server.url.replace("//", "//secret@"))
        assert RedisBroker(right).stats() == []
        right.close()
    finally:
        ask(driver, "CONFIG", "SET", "requirepass", "")


def test_replica_counts_as_an_unavailable_server(server: RedisServer, driver: RedisDriver) -> None:
    ask(driver, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BrokerUnavailable):
        RedisBroker(driver).put([message()], token="t")
    ask(driver, "REPLICAOF", "NO", "ONE")
    assert RedisBroker(driver).put([message()], token="t") is True


@pytest.mark.parametrize("fault", ["kill", "flush scripts"])
def test_work_goes_on_under_faults(server: RedisServer, fault: str) -> None:
    app = Server(Config(broker=server.url))
    nemesis = RedisDriver(server.url)
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.1):
            words = ("CLIENT", "KILL", "TYPE", "normal") if fault == "kill" else ("SCRIPT", "FLUSH")
            try:
                ask(nemesis, *words)
            except MachineryError:
                pass

    @app.task
    def double(n: int) -> int:
        return 2 * n

    thread = threading.Thread(target=disturb)
    with app.new_worker(concurrency=4):
        thread.start()
        results = [double.send(number) for number in range(300)]
        assert [result.get(timeout=HANG) for result in results] == [
            2 * number for number in range(300)
        ]
        over.set()
        thread.join(HANG)
    app.close()
    nemesis.close()


def test_a_worker_lives_on_when_everything_was_deleted(
    server: RedisServer, driver: RedisDriver
) -> None:
    app = Server(Config(broker=server.url, lease=1.0))

    @app.task
    def double(n: int) -> int:
        return 2 * n

    with app.new_worker(concurrency=4):
        for number in range(3):
            for _ in range(50):
                double.send(number)
            ask(driver, "FLUSHALL")
            wait_until(lambda: len(app.broker.workers()) == 1, what="the worker registers again")
            assert double.send(number).get(timeout=HANG) == 2 * number
    app.close()


def test_delayed_messages_come_within_a_tenth_of_a_second(server: RedisServer) -> None:
    broker = RedisBroker(RedisDriver(server.url))
    consumer = broker.consume(["other", "mail"], worker="w")

    def lateness(wait: float) -> float:
        due = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=wait)
        late = Message(uuid="u", name="n", queue="mail", body=b"late", eta=due)
        timer = threading.Timer(0.1, broker.put, [[late]], {"token": ""})
        timer.start()
        found: list[Any] = []
        started = time.monotonic()
        while not found and time.monotonic() - started < HANG:
            found = consumer.receive(5, 1.0)
        passed = (dt.datetime.now(dt.timezone.utc) - due).total_seconds()
        assert consumer.dispose([Disposal(delivery=one) for one in found]) == [True]
        return passed

    for wait in (0.3, 1.4):
        assert any(
            0 <= lateness(wait) < 0.1 for _ in range(10)
        )  # this process may have to wait for a processor
    broker.close()
    broker.driver.close()


DYING = """
import os, sys
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.brokers.redis.broker import RedisBroker
consumer = RedisBroker(RedisDriver(sys.argv[1])).consume(["mail", "news"], worker="dying")
held = consumer.receive(5, 5.0)
consumer.run_begins(held[0])
print(len(held), flush=True)
os._exit(9)
"""


def test_dead_worker_of_this_host_is_found_at_the_first_poll(
    server: RedisServer, driver: RedisDriver
) -> None:
    broker = RedisBroker(driver)
    broker.put([message(body=b"1"), message(body=b"2")], token="")
    child = subprocess.run(
        [sys.executable, "-c", DYING, server.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert (child.stdout, child.returncode) == ("2\n", 9), child.stderr

    broker.tend()

    consumer = broker.consume(["mail"], worker="heir")
    found = consumer.receive(5, 0)
    assert [(one.body, one.strikes, one.count) for one in found] == [
        (b"1", 1, 2),
        (b"2", 0, 2),
    ]  # it ran the first
    assert [worker.name for worker in broker.workers()] == ["heir"]
    consumer.close()


def test_message_on_any_queue_wakes_a_waiting_consumer(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    consumer = broker.consume(["first", "second", "mail"], worker="w")
    taken: list[float] = []
    for _ in range(5):
        put_at: list[float] = []

        def put(moments: list[float] = put_at) -> None:
            moments.append(time.monotonic())
            broker.put([message()], token="")

        threading.Timer(0.1, put).start()
        (delivery,) = consumer.receive(5, HANG)
        taken.append(time.monotonic() - put_at[0])
        consumer.dispose([Disposal(delivery=delivery)])
    assert sorted(taken)[2] < 0.5  # late by a second if nobody had woken it
    consumer.close()


@pytest.mark.parametrize("times", [1, 2])
def test_lost_reply_keeps_a_replayed_dead_letter_exactly_once(
    server: RedisServer, driver: RedisDriver, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    with Proxy(server.port) as proxy:
        app = Server(Config(broker=proxy.through(server.url)))
        consumer = app.broker.consume(["mail"], worker="w")
        sent = app.send_task(Signature(name="rare", routing_key="mail"))
        (delivery,) = consumer.receive(1, 0)
        consumer.dispose(
            [
                Disposal(
                    delivery=delivery, fate=Fate.DEAD, uuid=sent.uuid, name="rare", reason="poison"
                )
            ]
        )
        (letter,) = app.inspect.dead()
        assert (
            app.broker.take_dead(["0@mail"]) == []
        )  # Redis knows the script now, so that what is dropped was carried out
        proxy.drop_next_reply(matching=broker_scripts.TAKE_DEAD.sha, times=times)

        assert app.inspect.replay_dead([letter.id]) == [sent.uuid]

        assert proxy.counts["dropped"] == times
        assert ("may still be in the list" in caplog.text) is (times == 2)
        assert app.inspect.dead() == []
        assert [stats.waiting for stats in app.broker.stats()] == [1]
        consumer.close()
        app.close()


def test_a_batch_larger_than_one_reading_is_settled_at_once(driver: RedisDriver) -> None:
    both = store(driver)
    uuids = [f"task_{number}" for number in range(2_100)]
    created = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    both.submit(
        Submission(
            token="t",
            messages=[message(uuid, uuid.encode()) for uuid in uuids],
            states=[
                TaskState(task_uuid=uuid, task_name="add", created_at=created) for uuid in uuids
            ],
        )
    )
    session = both.open_session(["mail"], worker="w")
    deliveries = session.receive(len(uuids), 0)

    ends = [done(delivery, uuid) for delivery, uuid in zip(deliveries, uuids, strict=True)]
    for end in ends[::2]:
        session.prepare(end)
    assert session.settle([*ends, ends[0]]) == [SETTLED] * len(uuids) + [ALREADY]
    assert session.settle(ends[:3]) == [ALREADY] * 3

    states = both.backend.get_states(uuids)
    assert {(state.state, state.created_at) for state in states.values()} == {
        (State.SUCCESS, created)
    }
    assert ask(driver, "HLEN", f"mpy:{{mail}}:f:{session.consumer.session}") == 0  # type: ignore[attr-defined]
    session.close()


def test_the_creation_time_is_not_taken_from_a_result(driver: RedisDriver) -> None:
    backend = RedisBackend(driver)
    created = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    text = '{"State":"X","CreatedAt":"2001-01-01T00:00:00Z"}'
    for state in (State.PENDING, State.RETRY, State.STARTED, State.SUCCESS):
        backend.apply(
            [
                Change(
                    key="task_1",
                    states=(
                        TaskState(
                            task_uuid="task_1",
                            task_name=text,
                            state=state,
                            error=text if state is State.RETRY else "",
                            run=int(state in (State.STARTED, State.SUCCESS)),
                            results=(Arg(type="string", value=text),),
                            created_at=created
                            if state is State.PENDING
                            else created + dt.timedelta(days=1),
                        ),
                    ),
                )
            ]
        )
        found = backend.get_states(["task_1"])["task_1"]
        assert (found.state, found.created_at, found.task_name) == (state, created, text)


def test_queue_of_a_callback_is_listed_before_any_send(driver: RedisDriver) -> None:
    both = store(driver)
    both.submit(Submission(token="t", messages=[message()]))
    session = both.open_session(["mail"], worker="w")
    (delivery,) = session.receive(5, 0)
    callback = Message(uuid="task_2", name="add", queue="new", body=b"y")
    assert session.settle([Settlement(delivery=delivery, uuid="task_1", send=[callback])]) == [
        SETTLED
    ]
    assert [stats.queue for stats in both.broker.stats()] == ["mail", "new"]
    session.close()


def test_list_of_another_program_is_not_purged(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    driver.ask(b"RPUSH", b"jobs-of-others", b"1", b"2", doing="pushing")

    assert broker.purge("jobs-of-others") == 0

    assert driver.ask(b"LLEN", b"jobs-of-others", doing="counting") == 2
    broker.put([message()], token="")
    assert broker.purge("mail") == 1


def test_a_sleep_of_no_length_ends(driver: RedisDriver) -> None:
    """Redis takes less than half a millisecond, in three digits, for ever."""
    consumer = RedisBroker(driver).consume(["mail"], worker="w")

    for sleep in (0.0001, 0.0004, 0.0006):
        assert consumer._claim(1, ("mail",), sleep=sleep, will_sleep=False)[0] == []
    consumer.close()


def test_workers_of_one_process_can_tend_at_the_same_time(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)

    def work(number: int) -> None:
        for _ in range(20):
            with contextlib.closing(broker.consume(["mail"], worker=f"w{number}")):
                broker.tend()
            broker.tend()

    together(6, work)
    assert broker.workers() == []


def test_a_worker_that_moves_a_million_can_beat_in_between(
    driver: RedisDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "PATIENCE", 0.0)
    broker = RedisBroker(driver)
    due = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=0.5)
    # As Go writes it, for Go's delayed set.
    body = b'{"UUID":"task_%d","Name":"n","RoutingKey":"mail","Args":null}'
    late = [
        Message(uuid=f"task_{n}", name="n", queue="mail", body=body % n, eta=due)
        for n in range(3 * redis.MOVE + 1)
    ]
    broker.put(late, token="")
    wait_until(lambda: dt.datetime.now(dt.timezone.utc) > due, what="they are due")
    waiting: list[int] = []
    while broker.tend() == 0.0:
        waiting.append(ask(driver, "LLEN", "mail"))
    assert waiting == [redis.MOVE, 2 * redis.MOVE, 3 * redis.MOVE, 3 * redis.MOVE + 1]


def test_delayed_messages_are_counted_and_purged_in_steps(
    driver: RedisDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "COUNT", 3)
    broker = RedisBroker(driver)
    due = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
    for count, queue in ((7, "mail"), (2, "news")):
        body = b'{"UUID":"task_%d","Name":"n","RoutingKey":"' + queue.encode() + b'","Args":null}'
        broker.put(
            [
                Message(uuid=f"task_{n}", name="n", queue=queue, body=body % n, eta=due)
                for n in range(count)
            ],
            token="",
        )
        assert ask(driver, "ZCARD", "delayed_tasks") in (7, 9)
    assert {one.queue: one.delayed for one in broker.stats()} == {"mail": 7, "news": 2}
    assert (broker.purge("mail"), broker.purge("mail")) == (7, 0)
    assert {one.queue: one.delayed for one in broker.stats()} == {"mail": 0, "news": 2}
