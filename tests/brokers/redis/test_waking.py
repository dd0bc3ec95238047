"""Who waits at a Redis is woken, whenever the message comes; and nobody else is."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from machinery_py.brokers.base import Delivery, Disposal, Message
from machinery_py.brokers.redis import consumer as redis_consumer
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.consumer import RedisConsumer, client_of
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.connection import command
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private_redis import RedisServer

QUEUES = ["first", "second", "third"]


@pytest.fixture
def driver(redis_url: str) -> Iterator[RedisDriver]:
    driver = RedisDriver(redis_url)
    yield driver
    driver.close()


@pytest.fixture
def broker(driver: RedisDriver) -> Iterator[RedisBroker]:
    broker = RedisBroker(driver)
    yield broker
    broker.close()


@pytest.fixture
def long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wake-up that is lost show: nobody looks by himself while the test runs."""
    monkeypatch.setattr(redis_consumer, "BLOCK", 2 * HANG)
    monkeypatch.setattr(redis_consumer, "LINK_TIMEOUT", 3 * HANG)
    monkeypatch.setattr(redis_consumer, "STILL_IDLE", 2 * HANG)


def message(queue: str = "first", *, priority: int = 0, delay: float = 0.0) -> Message:
    eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=delay) if delay else None
    return Message(uuid="u", name="n", queue=queue, body=b"x", priority=priority, eta=eta)


class Waiter:
    """A thread in a call that waits, mostly `receive`."""

    def __init__(self, receive: Callable[[], Sequence[Delivery]]) -> None:
        self.found: list[Delivery] = []
        self.thread = threading.Thread(target=lambda: self.found.extend(receive()), daemon=True)
        self.thread.start()

    @classmethod
    def at(cls, consumer: RedisConsumer, limit: int = 5) -> Waiter:
        return cls(lambda: consumer.receive(limit, 2 * HANG))

    def has_ended(self) -> bool:
        self.thread.join(HANG)
        return not self.thread.is_alive()


def idle_at(driver: RedisDriver, queue: str = "first") -> int:
    return int(driver.ask(b"SCARD", b"mpy:{%b}:v" % queue.encode(), doing="counting"))


def blocked(driver: RedisDriver) -> int:
    text = driver.ask(b"INFO", b"clients", doing="counting").decode()
    return int(text.partition("blocked_clients:")[2].split()[0])


def wait_until_asleep(driver: RedisDriver, others: int, count: int = 1) -> None:
    wait_until(lambda: blocked(driver) == others + count, what="asleep")


PUTS: dict[str, Callable[[RedisBroker], object]] = {
    "plain": lambda broker: broker.put([message()], token=""),
    "of a priority": lambda broker: broker.put([message(priority=3)], token=""),
    "on another queue": lambda broker: broker.put([message("second")], token=""),
    "due soon": lambda broker: broker.put([message("third", delay=0.2)], token=""),
    "on a queue that is resumed": lambda broker: broker.resume("first"),
}


@pytest.mark.usefixtures("long_block")
@pytest.mark.parametrize("is_asleep", [False, True], ids=["between claim and sleep", "asleep"])
@pytest.mark.parametrize("how", PUTS)
def test_message_wakes_a_consumer(
    driver: RedisDriver, broker: RedisBroker, how: str, is_asleep: bool
) -> None:
    consumer = broker.consume(QUEUES, worker="w")
    if how == "on a queue that is resumed":
        broker.pause("first")
        broker.put([message()], token="")

    def sleep() -> list[Delivery]:
        found, due_in = list[Delivery](), 2 * HANG
        while not found:
            found, due_in = consumer._claim(5, QUEUES, sleep=due_in, will_sleep=True)
        return found

    if is_asleep:
        others = blocked(driver)
        waiter = Waiter.at(consumer)
        wait_until_asleep(driver, others)
        PUTS[how](broker)
    else:
        assert consumer._claim(5, QUEUES, sleep=0.0, will_sleep=True)[0] == []
        PUTS[how](broker)  # wakes a client that does not sleep yet
        waiter = Waiter(sleep)

    assert waiter.has_ended()
    assert len(waiter.found) == 1


@pytest.mark.usefixtures("long_block")
def test_messages_on_two_queues_wake_two_consumers(
    driver: RedisDriver, broker: RedisBroker
) -> None:
    for _ in range(7):  # a script wakes any of the idle ones for each of the two
        others = blocked(driver)
        consumers = [broker.consume(QUEUES, worker=name) for name in ("a", "b")]
        waiters = [Waiter.at(consumer, limit=1) for consumer in consumers]
        wait_until_asleep(driver, others, 2)

        broker.put([message("second"), message("third")], token="")

        assert all(waiter.has_ended() for waiter in waiters)
        assert [len(waiter.found) for waiter in waiters] == [1, 1]
        for consumer, waiter in zip(consumers, waiters, strict=True):
            consumer.dispose([Disposal(delivery=one) for one in waiter.found])
            consumer.close()


@pytest.mark.usefixtures("long_block")
@pytest.mark.parametrize("what", ["a worker", "a life of the server"])
def test_clients_that_are_gone_take_no_wake_up_from_others(
    driver: RedisDriver, broker: RedisBroker, what: str
) -> None:
    gone = broker.consume(QUEUES, worker="gone")
    for set_ in (b"v", b"w"):
        driver.ask(b"SADD", b"mpy:{second}:" + set_, *b"99 98 97".split(), doing="noting")
    if what == "a worker":
        assert gone.receive(5, 0.1) == []
    gone.close()
    others = blocked(driver)
    waiter = Waiter.at(broker.consume(QUEUES, worker="w"))
    wait_until_asleep(driver, others)

    broker.put([message("second")], token="")

    assert waiter.has_ended()
    assert len(waiter.found) == 1


@pytest.mark.parametrize("is_of_this_life", [False, True])
def test_numbers_of_an_earlier_server_wake_nobody(
    driver: RedisDriver, broker: RedisBroker, is_of_this_life: bool
) -> None:
    """After a restart another program's client has the number of one of ours."""
    stranger = driver.open(timeout=HANG)
    stranger.number = b"%d" % stranger.ask(b"CLIENT", b"ID")
    life = client_of(stranger).encode().partition(b".")[2]
    others = blocked(driver)
    stranger.send(command(b"BLPOP", b"jobs-of-another-program", b"0"))
    wait_until_asleep(driver, others)
    life = life if is_of_this_life else b"0123456789ab"
    driver.ask(b"SET", b"mpy:{first}:life", life, doing="noting")
    for put in ("of a priority", "plain", "on a queue that is resumed"):
        for set_ in (b"v", b"w"):
            driver.ask(b"SADD", b"mpy:{first}:" + set_, stranger.number, doing="noting")
        PUTS[put](broker)

    driver.ask(b"RPUSH", b"jobs-of-another-program", b"job", doing="pushing")
    expected = None if is_of_this_life else [b"jobs-of-another-program", b"job"]
    assert stranger.read() == expected
    stranger.close()
    driver.ask(b"DEL", b"jobs-of-another-program", doing="emptying")


def test_server_that_says_no_numbers_is_worked_with(
    redis_server: RedisServer, driver: RedisDriver
) -> None:
    """As one whose ACL forbids CLIENT ID, CLIENT UNBLOCK and INFO."""
    redis_server.cli("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all")
    redis_server.cli("ACL", "SETUSER", "plain", "-client", "+client|setname", "-info")
    url = driver.servers.urls[0].replace("redis://", "redis://plain:secret@")
    forbidden = RedisDriver(url)
    broker = RedisBroker(forbidden)
    consumer = broker.consume(QUEUES, worker="w")
    try:
        assert consumer.receive(5, 0.1) == []
        broker.put([message("second"), message("third", delay=0.1)], token="")
        found: list[Delivery] = []
        wait_until(lambda: found.extend(consumer.receive(5, 0.1)) or len(found) == 2, what="both")
        assert idle_at(driver, "second") == 0
    finally:
        broker.close()
        forbidden.close()
        redis_server.cli("ACL", "DELUSER", "plain")


def test_delayed_message_does_not_wait_for_a_tick_of_redis() -> None:
    with RedisServer(config={"hz": "1"}) as server:  # so it looks at timed blocks once a second
        driver = RedisDriver(server.url)
        broker = RedisBroker(driver)
        consumer = broker.consume(["first"], worker="w")
        late: list[float] = []
        for _ in range(7):
            due = message(delay=0.15)
            broker.put([due], token="")
            found: list[Delivery] = []
            while not found:
                found = consumer.receive(5, 1.0)
            assert due.eta is not None
            late.append((dt.datetime.now(dt.timezone.utc) - due.eta).total_seconds())
            consumer.dispose([Disposal(delivery=one) for one in found])
        assert min(late) >= 0
        # At a tick each but the first is 0.85 s late; on a busy machine any may be.
        assert sorted(late)[1] < 0.5
        broker.close()
        driver.close()


def test_idle_consumer_asks_little(driver: RedisDriver, broker: RedisBroker) -> None:
    def calls() -> int:
        text = driver.ask(b"INFO", b"commandstats", doing="counting").decode()
        line = next(line for line in text.splitlines() if line.startswith("cmdstat_evalsha:"))
        return int(line.partition("calls=")[2].partition(",")[0])

    consumer = broker.consume(QUEUES, worker="w")
    consumer.receive(5, 0.2)
    before = calls()

    for _ in range(10):
        assert consumer.receive(5, 0.2) == []

    assert calls() - before <= 12  # one claim each, behind its BLMOVE


@pytest.mark.usefixtures("long_block")
def test_sender_wakes_many_in_one_round_trip(driver: RedisDriver, broker: RedisBroker) -> None:
    def reads() -> int:
        text = driver.ask(b"INFO", b"stats", doing="counting").decode()
        return int(text.partition("total_reads_processed:")[2].split()[0])

    others = blocked(driver)
    consumers = [broker.consume(["first"], worker=f"w{number}") for number in range(20)]
    waiters = [Waiter.at(consumer, limit=1) for consumer in consumers]
    wait_until_asleep(driver, others, 20)
    before = reads()

    broker.put([message(priority=1) for _ in consumers], token="")

    assert reads() - before < 10  # of this client; the others have sent their claims already
    assert all(waiter.has_ended() for waiter in waiters)
    assert [len(waiter.found) for waiter in waiters] == [1] * 20


@pytest.mark.usefixtures("long_block")
@pytest.mark.parametrize("sleepers", [1, 3])
def test_order_of_what_sleepers_are_woken_by_is_that_of_their_queue(
    driver: RedisDriver, broker: RedisBroker, sleepers: int
) -> None:
    consumers = [broker.consume(["first"], worker=f"w{number}") for number in range(sleepers)]
    others, waiters = blocked(driver), []
    for number, consumer in enumerate(consumers):
        waiters.append(Waiter.at(consumer, limit=9))
        wait_until_asleep(driver, others, number + 1)
    bodies = [b"body %d" % number for number in range(7)]

    broker.put([Message(uuid="u", name="n", queue="first", body=body) for body in bodies], token="")
    assert all(waiter.has_ended() for waiter in waiters)
    found = [delivery for waiter in waiters for delivery in waiter.found]

    assert [one.body for one in sorted(found, key=lambda one: one.order or one.fence)] == bodies
