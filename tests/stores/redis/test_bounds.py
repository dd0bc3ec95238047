"""Large bodies on Redis: each script carries what bounds.py says, and the next one goes on."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import Server, TaskFailed, chord, group
from machinery_py.backends.base import SETTLED, Change
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.bounds import AT_ONCE, STEP_BYTES
from machinery_py.brokers.base import Disposal, Fate, Message
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.errors import MachineryError
from machinery_py.stores.base import Settlement, Submission
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.redis.case import Drivers, ServerClock, clock, open_driver
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer

__all__ = ["clock", "open_driver"]

MB = 1_000_000
COUNT = 24
#: Items of one step: those that fit, and the last look at more whose sizes are not known before.
MOST = STEP_BYTES // MB + AT_ONCE
STEPS = math.ceil(COUNT / MOST)


@pytest.fixture
def store(open_driver: Drivers) -> RedisStore:
    driver = open_driver()
    return RedisStore(RedisBroker(driver), RedisBackend(driver))


def message(number: int, **more: Any) -> Message:
    body = b"%d " % number + b"x" * MB
    return Message(uuid=f"task_{number}", name="add", queue="mail", body=body, **more)


def put(broker: RedisBroker, count: int = COUNT, **more: Any) -> None:
    for number in range(count):
        broker.put([message(number, **more)], token="")


def numbers(bodies: list[bytes]) -> list[int]:
    return [int(body.split(b" ", 1)[0]) for body in bodies]


def calls(driver: RedisDriver, then: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many scripts it runs, and what it returns."""

    def count() -> int:
        text = driver.ask(b"INFO", b"commandstats", doing="testing").decode()
        return int(text.partition("cmdstat_evalsha:calls=")[2].partition(",")[0] or 0)

    before = count()
    found = then()
    return count() - before, found


@pytest.mark.parametrize("way", ["list", "priority", "noted", "due", "fair"])
def test_claim_takes_no_more_than_one_step_may_carry(
    store: RedisStore, clock: ServerClock, way: str
) -> None:
    more: dict[str, Any] = {
        "priority": {"priority": 3},
        "noted": {"parks": 1},
        "due": {"eta": clock.now() + dt.timedelta(seconds=5)},
        "fair": {"tenant": "t"},
    }.get(way, {})
    put(store.messages, **more)
    clock.advance(6.0)
    consumer = store.messages.consume(["mail"], worker="w")

    found: list[bytes] = []
    while len(found) < COUNT:
        some = consumer.receive(100, HANG)
        assert 1 <= len(some) <= MOST
        found += [one.body for one in some]

    assert sorted(numbers(found)) == [*range(COUNT)]
    assert way == "due" or numbers(found) == [*range(COUNT)]


def test_small_messages_in_front_do_not_make_a_claim_large(store: RedisStore) -> None:
    small = [Message(uuid="s", name="s", queue="mail", body=b"s") for _ in range(50)]
    store.messages.put(small, token="")
    put(store.messages)
    found = store.messages.consume(["mail"], worker="w").receive(100, 0)

    assert [one.body for one in found[:50]] == [b"s"] * 50
    assert len(found) <= 50 + MOST


def test_lost_claims_come_back_in_steps_and_once(empty_redis: RedisServer) -> None:
    with Proxy(empty_redis.port) as proxy:
        driver = RedisDriver(proxy.through(empty_redis.url))
        broker = RedisBroker(driver)
        put(broker)
        consumer = broker.consume(["mail"], worker="w")
        found = [one.body for one in consumer.receive(2, 0)]
        for _ in range(3):
            proxy.drop_next_reply(matching=scripts.CLAIM.sha)
            with pytest.raises(MachineryError):
                consumer.receive(100, 0)
        assert proxy.counts["dropped"] == 3

        while len(found) < COUNT:
            some = consumer.receive(1, HANG)
            assert 1 <= len(some) <= MOST
            found += [one.body for one in some]

        assert sorted(numbers(found)) == [*range(COUNT)]
        assert consumer.receive(100, 0) == []
        consumer.close()
        driver.close()


def held_by_a_dead(store: RedisStore, clock: ServerClock) -> None:
    """Let a consumer die that holds all, and runs the first and the last two."""
    put(store.messages)
    consumer = store.messages.consume(["mail"], worker="w")
    held: list[Any] = []
    while len(held) < COUNT:
        held += consumer.receive(100, 0)
    for one in (held[0], *held[-2:]):
        consumer.run_begins(one)
    clock.advance(11.0)
    store.messages.tend()
    clock.advance(11.0)


def test_what_a_dead_consumer_held_comes_back_in_steps(
    store: RedisStore, clock: ServerClock
) -> None:
    held_by_a_dead(store, clock)
    count, _ = calls(store.driver, store.messages.tend)
    assert count >= COUNT * MB // STEP_BYTES

    heir, again = store.messages.consume(["mail"], worker="heir"), list[Any]()
    while len(again) < COUNT:
        again += heir.receive(100, HANG)
    assert numbers([one.body for one in again]) == [*range(COUNT)]
    assert [one.strikes for one in again] == [1, *[0] * (COUNT - 3), 1, 1]


def test_what_was_not_given_back_is_found_at_the_tombstone(
    store: RedisStore, clock: ServerClock, open_driver: Drivers
) -> None:
    class Dying(RedisDriver):
        def run(self, script: Any, *values: object, **more: Any) -> Any:
            if script is scripts.GIVE_BACK:
                raise MachineryError("killed")
            return super().run(script, *values, **more)

    held_by_a_dead(store, clock)
    dying = Dying(open_driver.url, clock=clock)
    other = RedisBroker(dying)
    other.tend()
    clock.advance(7.6)
    with pytest.raises(MachineryError, match="killed"):
        other.tend()
    dying.close()

    heir, again = store.messages.consume(["mail"], worker="heir"), list[Any]()
    while len(again) < COUNT:
        pause = store.messages.tend()
        some = heir.receive(100, 0)
        assert some or pause == 0.0
        again += some
    found = {
        number: one.strikes
        for number, one in zip(numbers([a.body for a in again]), again, strict=True)
    }
    assert found == {n: int(n in (0, COUNT - 2, COUNT - 1)) for n in range(COUNT)}


def test_states_are_read_in_steps(store: RedisStore) -> None:
    uuids = [f"task_{number}" for number in range(COUNT)]
    for uuid in uuids:
        state = TaskState(
            task_uuid=uuid,
            state=State.SUCCESS,
            results=(Arg(type="string", value="x" * MB),),
        )
        store.backend.apply([Change(key=uuid, states=(state,))])

    count, found = calls(store.driver, lambda: store.backend.get_states(uuids))

    assert list(found) == uuids
    assert count >= COUNT * MB // STEP_BYTES
    assert list(store.states.member_results("g", uuids)) == uuids


def test_changes_are_written_in_steps(store: RedisStore) -> None:
    results = (Arg(type="string", value="x" * MB),)
    changes = [
        Change(
            key=f"t{number}",
            states=(TaskState(task_uuid=f"t{number}", state=State.SUCCESS, results=results),),
        )
        for number in range(COUNT)
    ]
    count, verdicts = calls(store.driver, lambda: store.backend.apply(changes))

    assert len(verdicts) == COUNT
    assert count == math.ceil(COUNT / (STEP_BYTES // MB))  # sized before all is packed


def test_settlements_are_committed_in_steps(store: RedisStore) -> None:
    store.messages.put(
        [Message(uuid=f"t{n}", name="t", queue="mail", body=b"%d" % n) for n in range(COUNT)],
        token="",
    )
    session = store.open_session(["mail"], worker="w")
    results = (Arg(type="string", value="x" * MB),)
    ends = [
        Settlement(
            delivery=one,
            uuid=f"t{number}",
            name="t",
            states=(TaskState(task_uuid=f"t{number}", state=State.SUCCESS, results=results),),
        )
        for number, one in enumerate(session.receive(100, 0))
    ]
    count, verdicts = calls(store.driver, lambda: session.settle(ends))

    assert verdicts == [SETTLED] * COUNT
    assert count >= COUNT * MB // STEP_BYTES


@pytest.mark.parametrize("way", ["submit", "put"])
def test_many_large_messages_are_stored_in_steps(store: RedisStore, way: str) -> None:
    messages = [message(number) for number in range(COUNT)]
    states = [TaskState(task_uuid=one.uuid, task_name="add") for one in messages]

    def send() -> None:
        if way == "put":
            assert store.messages.put(messages, token="t")
            assert not store.messages.put(messages, token="t")
        else:
            store.submit(Submission(token="t", messages=messages, states=states))
            store.submit(Submission(token="t", messages=messages, states=states))

    count, _ = calls(store.driver, send)

    assert count >= COUNT * MB // STEP_BYTES
    assert numbers([one.body for one in store.messages.pending("mail", 99)]) == [*range(COUNT)]


def test_listings_and_dead_letters_are_read_in_steps(store: RedisStore, clock: ServerClock) -> None:
    broker = store.messages
    put(broker, 12, eta=clock.now() + dt.timedelta(seconds=50))
    count, delayed = calls(store.driver, lambda: broker.delayed(99))
    assert (count >= 2, sorted(numbers([one.body for one in delayed]))) == (True, [*range(12)])
    assert sum(one.delayed for one in broker.stats()) == 12
    broker.purge("mail")

    put(broker, 12)
    count, pending = calls(store.driver, lambda: broker.pending("mail", 99))
    assert (count >= 3, sorted(numbers([one.body for one in pending]))) == (True, [*range(12)])
    assert len(broker.pending("mail", 7)) == 7

    consumer = broker.consume(["mail"], worker="w")
    for _ in range(12):
        (one,) = consumer.receive(1, HANG)
        consumer.dispose([Disposal(delivery=one, fate=Fate.DEAD, reason="poison")])
    count, letters = calls(store.driver, lambda: broker.dead_letters(limit=99))
    assert (count >= 3, len(letters)) == (True, 12)
    assert [one.id for one in broker.dead_letters(limit=5)] == [one.id for one in letters[:5]]
    ids = [one.id for one in letters]
    count, taken = calls(store.driver, lambda: broker.take_dead(["none@mail", *ids]))
    assert (count >= 2, [one.id for one in taken]) == (True, ids)
    assert broker.dead_letters(limit=99) == []


@pytest.fixture
def narrow_url() -> Iterator[str]:
    """A Redis that takes no value of more than a megabyte, which it is told while it is used."""
    with RedisServer() as server:
        yield server.url


def test_what_redis_refuses_for_its_size_fails_its_own_task(narrow_url: str) -> None:
    server = Server(narrow_url)
    sizes = [10, 500_000, 1_048_500, 900_000, 20, 1_048_500]

    @server.task
    def report(size: int) -> str:
        return "x" * size

    results = [report.send(size) for size in sizes]
    driver = RedisDriver(narrow_url)
    driver.ask(b"CONFIG", b"SET", b"proto-max-bulk-len", b"1048576", doing="testing")
    with server.new_worker("w", concurrency=len(sizes)) as worker:
        wait_until(lambda: worker.processed == len(sizes))
        for size, result in zip(sizes, results, strict=True):
            if size > 1_000_000:
                with pytest.raises(TaskFailed, match="larger than proto-max-bulk-len"):
                    result.get(timeout=HANG)
            else:
                assert len(result.get(timeout=HANG)) == size
    driver.close()
    server.close()


def test_callback_that_redis_refuses_for_its_size_fails(narrow_url: str) -> None:
    server = Server(narrow_url)

    @server.task
    def report() -> str:
        return "x" * 400_000

    @server.task
    def gather(texts: list[str]) -> int:
        return len(texts)

    result = server.send_chord(
        chord(group(*[report.signature() for _ in range(4)]), gather.partial())
    )
    driver = RedisDriver(narrow_url)
    driver.ask(b"CONFIG", b"SET", b"proto-max-bulk-len", b"1048576", doing="testing")
    with (
        server.new_worker("w", concurrency=4),
        pytest.raises(TaskFailed, match="larger than proto-max-bulk-len"),
    ):
        result.get(timeout=HANG)
    driver.close()
    server.close()
