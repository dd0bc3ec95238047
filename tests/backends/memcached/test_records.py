"""Claims and schedules in memcached: cut-off commands, lost replies and evicted records."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import pytest

from machinery_py import Config, PublishUnknown, Server, Signature
from machinery_py.backends.base import SETTLED, Change, Rider, Verdict, sending_key
from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.backends.memcached.documents import key_of
from machinery_py.backends.memcached.records import CLAIM, LIST, RECORD, REMOVED_LIFE
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import MemcacheDriver, Window, delete
from machinery_py.errors import BackendUnavailable
from machinery_py.rows.memory import MemoryRows
from machinery_py.schedules.scheduler import Scheduler
from machinery_py.stores.open import Stores
from machinery_py.stores.outbox import TwoStores
from machinery_py.tasks.states import State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import claim
from machinery_py.testing.conformance.fencing import drain, message_of, state_of
from machinery_py.testing.conformance.schedules import amend, bodies
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.backends.memcached.case import time_left
from tests.support.proxy import Proxy
from tests.support.servers import MemcachedServer


class Died(BaseException):
    """Stands for SIGKILL: nobody catches it."""


class FaultyDriver(MemcacheDriver):
    """Its process dies before one of its requests, or the reply to that is lost."""

    left: int = -1  # requests until then
    at_last: Callable[[], object] | None = None

    def _talk(self, plan: Mapping[int, Sequence[Window]], *, doing: str, again: bool) -> None:
        if plan and self.left == 0 and self.at_last is not None:
            self.at_last()
        self.left -= bool(plan)
        super()._talk(plan, doing=doing, again=again)


class Bench:
    """Two processes over one broker and one memcached: one may meet a fault, the other goes on."""

    def __init__(self, server: MemcachedServer, url: str = "") -> None:
        self.clock = ManualClock()
        broker = MemoryBroker(MemoryRows(self.clock))
        self.faulty = FaultyDriver(
            parse_memcache_url(url or server.url), clock=self.clock, timeout=HANG
        )
        self.driver = MemcacheDriver(parse_memcache_url(server.url), clock=self.clock, timeout=HANG)
        self.store = TwoStores(broker, MemcacheBackend(self.faulty), self.clock)
        self.heir = TwoStores(broker, MemcacheBackend(self.driver), self.clock)

    def finish(self) -> None:
        self.clock.advance(6.0)
        self.heir.tend()
        assert self.heir.backend.unsent(9, older_than=0.0) == []

    def close(self) -> None:
        self.faulty.close()
        self.driver.close()


@pytest.fixture
def bench(empty_memcached: MemcachedServer) -> Iterator[Bench]:
    bench = Bench(empty_memcached)
    yield bench
    bench.close()


def die() -> None:
    raise Died


def test_a_send_that_is_cut_off_anywhere_is_made_or_not(bench: Bench) -> None:
    bench.faulty.at_last = die
    sent: list[str] = []
    number, dies, taken = 0, True, 0
    while dies:
        name = f"key {number}"
        bench.faulty.left = number
        try:
            assert claim(bench.store, name, None, b"1", f"t{number}")
            dies = False
        except Died:
            pass

        (body,) = bench.heir.backend.claims([name])
        if body is None:
            assert claim(bench.heir, name, None, b"2", f"u{number}")
            sent.append(f"u{number}")
        else:  # whoever reads it finds its task: else it would look as if that were over
            assert bench.heir.backend.get_state(f"t{number}").state is State.PENDING
            assert not claim(bench.heir, name, None, b"2", f"u{number}")
            sent.append(f"t{number}")
            taken += dies
        number += 1
    bench.finish()

    assert set(drain(bench.heir, "q")) == set(sent)
    assert number > 8
    assert 2 < taken < number - 2


def test_a_tick_that_is_cut_off_anywhere_is_sent_once(bench: Bench) -> None:
    bench.faulty.at_last = die
    amend(bench.heir, "s", None, b"0")
    number, dies = 0, True
    while dies:
        before, after = b"%d" % number, b"%d" % (number + 1)
        bench.faulty.left = number
        try:
            assert amend(bench.store, "s", before, after, f"t{number}")
            dies = False
        except Died:
            pass
        if bodies(bench.heir) == {"s": before}:
            assert amend(bench.heir, "s", before, after, f"t{number}")
        assert bodies(bench.heir) == {"s": after}
        number += 1
    bench.finish()

    assert set(drain(bench.heir, "q")) == {f"t{one}" for one in range(number)}
    assert number > 8


def test_a_schedule_whose_making_is_cut_off_is_there_or_not(bench: Bench) -> None:
    bench.faulty.at_last = die
    number, dies = 0, True
    while dies:
        name = f"s{number}"
        bench.faulty.left = number
        try:
            amend(bench.store, name, None, b"1")
            dies = False
        except Died:
            pass
        is_there = name in bodies(bench.heir)
        assert amend(bench.heir, name, None, b"1") is not is_there
        assert bodies(bench.heir)[name] == b"1"
        number += 1
    assert number > 4


@pytest.mark.parametrize("times", [1, 2])
def test_whichever_reply_is_lost_a_task_is_sent_and_no_other(
    empty_memcached: MemcachedServer, times: int
) -> None:
    """With 2, the reply to the driver's own repeat is lost as well."""
    with Proxy(empty_memcached.port) as proxy:
        bench = Bench(empty_memcached, proxy.through(empty_memcached.url))
        bench.faulty.at_last = lambda: proxy.drop_next_reply(times=times)
        number = 0
        bench.faulty.left = -1
        sent: set[str] = set()
        while bench.faulty.left < 0:
            name, uuid = f"key {number}", f"t{number}"
            bench.faulty.left = number
            for _ in range(2):
                try:
                    # As the sender does it: what it finds under its own token was done.
                    if bench.store.backend.claims([name]) == [None]:
                        assert claim(bench.store, name, None, b"1", uuid)
                    else:
                        bench.store.publish_left(sending_key(name, uuid))
                    break
                except BackendUnavailable:
                    proxy.heal()
            else:
                raise AssertionError(f"request {number} failed twice")
            proxy.heal()
            sent.add(uuid)
            assert not claim(bench.heir, name, None, b"2", "another")
            if bench.faulty.left >= 0:
                break
            number += 1
        bench.finish()

        assert number > 8
        assert set(drain(bench.heir, "q")) == sent
        bench.close()


def test_unfinished_steps_of_a_claim_outlive_its_change(bench: Bench) -> None:
    """A window ends and another takes the key before the first one's message was published."""
    first = Change(
        key=sending_key("a", "t"),
        states=[state_of("t")],
        outbox=[msgspec.json.encode(message_of("t"))],
        riders=[Rider(name="a", expected=None, body=b"1", life=50.0)],
    )
    assert bench.store.backend.apply([first]) == [SETTLED]
    bench.clock.advance(60.0)
    assert bench.heir.backend.claims(["a"]) == [None]
    assert claim(bench.heir, "a", None, b"2", "u")
    bench.heir.backend.release([("a", b"2")])
    bench.finish()

    assert set(drain(bench.heir, "q")) == {"t", "u"}
    assert bench.heir.backend.claims(["a"]) == [None]


# What memcached forgets


def test_a_claim_that_is_forgotten_lets_a_second_one_in(empty_memcached: MemcachedServer) -> None:
    """Unwanted, but documented in docs/how-to/memcache.md and told by `features.forgets`."""
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    ran: list[int] = []
    task = server.task("work", unique=True)(ran.append)
    assert server.backend.features.forgets
    first = task.send(1)
    assert task.send(1).uuid == first.uuid

    empty_memcached.flush()
    second = task.send(1)

    assert not second.duplicate
    with server.new_worker(concurrency=1):
        second.get(timeout=HANG)
        wait_until(lambda: ran == [1, 1])
        assert not task.send(1).duplicate
    server.close()


class _With(Stores):
    def __init__(self, stores: Stores, store: TwoStores) -> None:
        self.__dict__.update(stores.__dict__)
        self._own = store

    @property
    def store(self) -> TwoStores:  # type: ignore[override]  # the same, with faults
        return self._own


def test_message_only_in_memcached_is_not_reported_as_sent(
    empty_memcached: MemcachedServer,
) -> None:
    server = Server(
        Config(broker="memory://", result_backend=empty_memcached.url, publish_timeout=2.0)
    )
    stores = Stores(server.config, server.clock)
    broker = FlakyBroker(stores.store.broker)
    server.app.swap(
        server.config,
        server.clock,
        _With(stores, TwoStores(broker, stores.store.backend, server.clock)),
    )
    task = server.task("work", unique=True)(lambda number: number)
    for _ in range(1000):
        broker.faults.next_call("put")

    with pytest.raises(PublishUnknown, match="may have been sent"):
        task.send(1)
    broker.faults.heal()
    joined = task.send(1)

    assert joined.duplicate  # its state and its message are still there, and a worker publishes it
    [(key, _)] = server.backend.unsent(9, older_than=0.0)
    server.app.store.publish_left(key)  # type: ignore[attr-defined]
    with server.new_worker(concurrency=1):
        assert joined.get(timeout=HANG) == 1
    server.close()


def test_message_lost_with_its_claim_is_sent_by_the_next_try(
    empty_memcached: MemcachedServer,
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    stores = Stores(server.config, server.clock)
    backend = FlakyBackend(stores.store.backend)
    apply = backend.inner.apply

    def forgotten(changes: Sequence[Change]) -> list[Verdict]:
        done = apply(changes)
        flush_claim(empty_memcached, changes[0].riders[0].name)
        backend.inner.apply = apply  # type: ignore[method-assign]
        return done

    backend.inner.apply = forgotten  # type: ignore[method-assign]
    backend.faults.next_call("apply", lose_reply=True)
    server.app.swap(
        server.config,
        server.clock,
        _With(stores, TwoStores(stores.store.broker, backend, server.clock)),
    )
    ran: list[int] = []
    task = server.task("work", unique=True)(ran.append)

    first = task.send(1)

    assert not first.duplicate
    assert task.send(1).uuid == first.uuid
    with server.new_worker(concurrency=1):
        first.get(timeout=HANG)
    assert ran == [1]
    server.close()


def flush_claim(server: MemcachedServer, name: str) -> None:
    driver = MemcacheDriver(parse_memcache_url(server.url))
    driver.send([delete(key_of(name, CLAIM))], doing="testing")
    driver.close()


class App:
    """A program that declares one schedule."""

    def __init__(self, server: MemcachedServer) -> None:
        self.clock = ManualClock(dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc))
        self.server = Server(
            Config(broker="memory://", result_backend=server.url), clock=self.clock
        )
        self.server.register_task("note", lambda: None)
        self.server.register_periodic_task("* * * * *", "s", Signature(name="note"))
        self.scheduler = Scheduler(self.server.app, self.server.declared)

    def go(self, seconds: int) -> int:
        """Let time pass; how many tasks wait then."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.scheduler.step()
        return len(self.server.broker.get_pending_tasks())


@pytest.mark.parametrize("forgotten", ["all", "the list", "the record"])
def test_declared_schedule_is_stored_again_when_evicted(
    empty_memcached: MemcachedServer, forgotten: str
) -> None:
    app = App(empty_memcached)
    assert app.go(60) == 1
    driver = MemcacheDriver(parse_memcache_url(empty_memcached.url))

    if forgotten == "all":
        empty_memcached.flush()
    else:
        driver.send([delete(LIST if forgotten == "the list" else RECORD + b"s")], doing="testing")
    assert app.go(120) == 3

    assert [one.name for one in app.server.schedules.list()] == ["s"]
    driver.close()
    app.server.close()


def test_removed_schedule_is_remembered_for_a_day(bench: Bench) -> None:
    backend = MemcacheBackend(bench.driver)
    amend(bench.heir, "a", None, b"1")
    amend(bench.heir, "b", None, b"1")
    amend(bench.heir, "a", b"1", None)
    era = backend.records().era
    bench.clock.advance(REMOVED_LIFE / 1e6 + 60.0)
    backend.tend()

    assert bodies(bench.heir) == {"b": b"1"}
    assert backend.records().era == era
    assert backend._records._all()[0].listed_at.keys() == {"b"}
    assert amend(bench.heir, "a", None, b"2")
    assert bodies(bench.heir) == {"a": b"2", "b": b"1"}


def test_schedules_made_at_once_by_many_are_all_listed(bench: Bench) -> None:
    assert (
        together(12, lambda index: amend(bench.heir, f"s{index}", None, b"%d" % index))
        == [True] * 12
    )
    assert bodies(bench.heir) == {f"s{index}": b"%d" % index for index in range(12)}


def test_an_item_of_a_claim_goes_with_its_life(
    bench: Bench, empty_memcached: MemcachedServer
) -> None:
    assert claim(bench.heir, "a", None, b"1", "t", life=100.0)
    left = time_left(empty_memcached, [CLAIM + b"a"])
    assert 60.0 < left[CLAIM + b"a"] <= 100.0
