"""Refused, forgotten and cut-off commands of a real memcached."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from machinery_py import Config, Server, Task, TaskFailed, Worker, chord, group
from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Change
from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.backends.memcached.documents import key_of
from machinery_py.backends.memcached.index import DEAD, Index, OpenName
from machinery_py.bounds import in_steps
from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import LineCommand, MemcacheDriver, delete
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    ResultExpired,
    StateNotFound,
    Unsupported,
)
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import Arrival, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.proxy import Direction, Proxy
from tests.support.servers import MemcachedServer, require


@pytest.fixture
def driver(empty_memcached: MemcachedServer) -> Iterator[MemcacheDriver]:
    driver = MemcacheDriver(parse_memcache_url(empty_memcached.url))
    yield driver
    driver.close()


@pytest.fixture
def proxy(empty_memcached: MemcachedServer) -> Iterator[Proxy]:
    with Proxy(empty_memcached.port) as proxy:
        yield proxy


class LosingDriver(MemcacheDriver):
    """Loses the reply to one request: the server executes it, and the connection is reset."""

    proxy: Proxy
    lose: int = -1  # which request from now, counted from 0
    times: int = 1

    def _talk(self, server: int, packet: bytes, read: Any, *, doing: str) -> Any:
        if self.lose == 0:
            self.proxy.drop_next_reply(times=self.times)
        self.lose -= 1
        return super()._talk(server, packet, read, doing=doing)


@pytest.fixture
def losing(proxy: Proxy, empty_memcached: MemcachedServer) -> Iterator[LosingDriver]:
    """To the server, by way of the proxy."""
    driver = LosingDriver(parse_memcache_url(proxy.through(empty_memcached.url)), timeout=0.3)
    driver.proxy = proxy
    yield driver
    driver.close()


@pytest.fixture
def through(losing: LosingDriver) -> MemcacheBackend:
    """A backend behind the proxy."""
    return MemcacheBackend(losing)


def state(uuid: str, word: State = State.SUCCESS) -> TaskState:
    return TaskState(task_uuid=uuid, task_name="add", state=word, queue="q")


def settle(
    backend: MemcacheBackend,
    uuid: str,
    *,
    mark: str = "m",
    epoch: int = 0,
    arrivals: tuple[Arrival, ...] = (),
) -> object:
    change = Change(
        key=uuid,
        mark=mark,
        epoch=epoch,
        states=(state(uuid), state(f"{uuid}_next", State.PENDING)),
        arrivals=arrivals,
        outbox=(b"message",),
    )
    return backend.apply([change])[0]


def arrival(member: str, total: int, *, group_uuid: str = "g") -> Arrival:
    return Arrival(
        group_uuid=group_uuid, task_uuid=member, total=total, ok=True, callback=b"callback"
    )


# Replies that are lost, and connections


@pytest.mark.parametrize("times", [1, 2])
def test_whichever_reply_is_lost_a_repeat_ends_as_if_none_was(
    proxy: Proxy, losing: LosingDriver, through: MemcacheBackend, times: int
) -> None:
    """The reply to each request of a settlement in turn; 2: also to the driver's own repeat."""
    failed = request = 0
    losing.times = times
    left = -1
    while left < 0:
        uuid, name = f"task_{request}", f"g{request}"
        through.apply([Change(key=uuid, states=(state(uuid, State.PENDING),))])
        (begun,) = through.begin([(uuid, 0)])
        arrivals = (arrival(uuid, 1, group_uuid=name),)
        losing.lose = request
        try:
            verdict = settle(through, uuid, epoch=begun.epoch, arrivals=arrivals)
        except BackendUnavailable:
            failed += 1
            proxy.heal()
            verdict = settle(through, uuid, epoch=begun.epoch, arrivals=arrivals)
        left, losing.lose = losing.lose, -1
        proxy.heal()

        assert verdict in (SETTLED, ALREADY)
        assert through.outboxes([uuid]) == [[b"message"]]
        assert set(through.get_states([uuid, f"{uuid}_next"])) == {uuid, f"{uuid}_next"}
        assert name in [one.group_uuid for one in through.ready_groups(99)]
        request += 1
    assert request > 8  # there were so many requests
    assert failed > 8 if times == 2 else failed == 0  # every request may come twice


@pytest.mark.parametrize("times", [1, 2])
def test_chord_is_fired_once_when_any_reply_is_lost(
    proxy: Proxy, losing: LosingDriver, through: MemcacheBackend, times: int
) -> None:
    request = 0
    losing.times = times
    left = -1
    while left < 0:
        name, callback = f"g{request}", f"callback_{request}"
        through.init_group(name, ["a", "b"])
        change = Change(
            key=name, fires=name, states=(state(callback, State.PENDING),), outbox=(b"message",)
        )
        losing.lose = request
        try:
            fired = through.apply([change]) == [SETTLED]
        except BackendUnavailable:
            proxy.heal()
            fired = through.apply([change]) == [SETTLED]
        left, losing.lose = losing.lose, -1
        proxy.heal()

        # Else nobody can be told that it was he: whoever looks for what is unsent sends it.
        assert dict(through.unsent(99, older_than=0.0))[name] == [b"message"]
        assert fired or times == 2
        assert through.get_states([callback])
        assert through.trigger_chord(name) is False
        through.clear_outbox([(name, [b"message"])])
        assert through.unsent(99, older_than=0.0) == []
        request += 1
    assert request > 4


class Died(BaseException):
    """Stands for SIGKILL: nobody catches it."""


class DyingDriver(MemcacheDriver):
    """Its process dies before one of its requests."""

    left: int = -1  # requests that it lives for

    def _talk(self, server: int, packet: bytes, read: Any, *, doing: str) -> Any:
        if self.left == 0:
            raise Died
        self.left -= 1
        return super()._talk(server, packet, read, doing=doing)


def test_settlement_cut_off_anywhere_is_finished_by_redelivery(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    heir = MemcacheBackend(driver)
    request = runs = 0
    died = True
    while died:
        uuid, name = f"task_{request}", f"g{request}"
        heir.apply([Change(key=uuid, states=(state(uuid, State.PENDING),))])
        arrivals = (arrival(uuid, 1, group_uuid=name),)
        dying = DyingDriver(parse_memcache_url(empty_memcached.url))
        backend = MemcacheBackend(dying)
        (begun,) = backend.begin([(uuid, 0)])
        dying.left = request
        try:
            settle(backend, uuid, epoch=begun.epoch, arrivals=arrivals)
            died = False
        except Died:
            pass

        (again,) = heir.begin([(uuid, 0)])
        if again.finished:
            assert list(again.outbox) == [b"message"]
        else:
            runs += 1
            assert name not in [one.group_uuid for one in heir.ready_groups(99)]
            assert settle(heir, uuid, mark="heir", epoch=again.epoch, arrivals=arrivals) is SETTLED

        assert set(heir.get_states([uuid, f"{uuid}_next"])) == {uuid, f"{uuid}_next"}
        assert name in [one.group_uuid for one in heir.ready_groups(99)]
        dying.close()
        request += 1
    assert request > 12
    assert 0 < runs < request - 6


def test_chord_firing_cut_off_anywhere_is_finished_by_another(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    heir = MemcacheBackend(driver)
    request = 0
    died = True
    for outbox in ((b"message",), ()):
        while died or request == 0:
            name, callback = f"g{len(outbox)}_{request}", f"callback_{len(outbox)}_{request}"
            heir.apply([Change(key="m", arrivals=(arrival("m", 1, group_uuid=name),))])
            change = Change(
                key=name, fires=name, states=(state(callback, State.FAILURE),), outbox=outbox
            )
            dying = DyingDriver(parse_memcache_url(empty_memcached.url))
            dying.left = request
            try:
                MemcacheBackend(dying).apply([change])
                died = False
            except Died:
                died = True

            unsent = dict(heir.unsent(99, older_than=0.0))
            if name in [one.group_uuid for one in heir.ready_groups(99)]:
                assert heir.get_states([callback]) == {}
                assert heir.apply([change]) == [SETTLED]
            else:
                assert unsent.get(name, []) == list(outbox)
            assert heir.get_state(callback).state is State.FAILURE
            heir.clear_outbox([(name, outbox)])
            dying.close()
            request += 1
        assert request > 5
        request = 0


def test_connection_closed_while_idle_is_replaced(proxy: Proxy, through: MemcacheBackend) -> None:
    for number in range(5):
        assert settle(through, f"task_{number}") is SETTLED
        (proxy.reset if number % 2 else proxy.finish)()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_server_that_does_not_answer_is_waited_for_briefly(
    proxy: Proxy, through: MemcacheBackend, direction: Direction
) -> None:
    settle(through, "task_1")
    proxy.black_hole(direction)
    with pytest.raises(BackendUnavailable, match="memcached at 127.0.0.1:.* no answer in time"):
        through.get_state("task_1")
    proxy.heal()
    assert through.get_state("task_1").state is State.SUCCESS


def test_replies_that_come_in_pieces_are_put_together(
    proxy: Proxy, through: MemcacheBackend
) -> None:
    proxy.chop()
    uuids = [f"task_{number}" for number in range(20)]
    assert (
        through.apply([Change(key=uuid, mark="m", states=(state(uuid),)) for uuid in uuids])
        == [SETTLED] * 20
    )
    assert set(through.get_states(uuids)) == set(uuids)


def test_a_server_that_is_no_memcached_is_named() -> None:
    require(MemcachedServer)
    backend = MemcacheBackend(MemcacheDriver([("127.0.0.1", 1)]))
    with pytest.raises(
        BackendUnavailable, match="memcached at 127.0.0.1:1: reading states: .*refused"
    ):
        backend.get_state("task_1")
    listener = backend.listener()
    listener.watch(["task_1"])
    listener.wait(0.01)  # it does not raise: whoever waits reads the state himself
    listener.close()


def test_threads_and_forked_processes_have_connections_of_their_own(driver: MemcacheDriver) -> None:
    backend = MemcacheBackend(driver)
    settle(backend, "task_0")

    def work(index: int) -> None:
        for number in range(20):
            uuid = f"task_{index}_{number}"
            assert settle(backend, uuid) is SETTLED
            assert backend.get_state(uuid).task_uuid == uuid

    children = [
        multiprocessing.get_context("fork").Process(target=work, args=(100 + index,))
        for index in range(2)
    ]
    for child in children:
        child.start()
    together(4, work)
    for child in children:
        child.join(HANG)
        assert child.exitcode == 0
    open_keys = {key for key, _ in backend.unsent(1000, older_than=0.0)}
    assert len(open_keys) == 6 * 20 + 1


# What memcached forgets


def test_worker_without_lease_is_fenced_after_its_epoch_expired(
    driver: MemcacheDriver, empty_memcached: MemcachedServer
) -> None:
    backend = MemcacheBackend(driver)
    (old,) = backend.begin([("task_1", 0)])
    empty_memcached.flush()
    (new,) = backend.begin([("task_1", 0)])

    assert settle(backend, "task_1", mark="old", epoch=old.epoch) is FENCED
    assert settle(backend, "task_1", mark="new", epoch=new.epoch) is SETTLED


def test_state_evicted_while_its_task_runs_is_stored_again(
    driver: MemcacheDriver, empty_memcached: MemcachedServer
) -> None:
    backend = MemcacheBackend(driver)
    (begun,) = backend.begin([("task_1", 0)])
    empty_memcached.flush()

    assert settle(backend, "task_1", epoch=begun.epoch) is SETTLED

    assert backend.get_state("task_1").state is State.SUCCESS
    assert backend.unsent(9, older_than=0.0) == [("task_1", [b"message"])]


def test_chord_survives_the_loss_of_the_index(
    driver: MemcacheDriver, empty_memcached: MemcachedServer
) -> None:
    backend = MemcacheBackend(driver)
    for number in range(600):
        if number in (1, 300, 599):
            driver.send([delete(backend._index._key)], doing="testing")
        member = f"m{number}"
        backend.apply(
            [Change(key=member, states=(state(member),), arrivals=(arrival(member, 600),))]
        )
        assert bool(backend.ready_groups(1)) is (number == 599)
    driver.send([delete(backend._index._key)], doing="testing")
    assert [one.group_uuid for one in backend.ready_groups(9)] == ["g"]


def test_an_arrival_costs_the_same_in_a_chord_of_any_size(driver: MemcacheDriver) -> None:
    backend = MemcacheBackend(driver)
    cost: dict[int, int] = {}
    send = driver.send
    for size in (1_000, 40_000):
        name = f"g{size}"
        members = [arrival(f"m{number}", size, group_uuid=name) for number in range(size)]
        backend.apply([Change(key="", arrivals=members[:-1])])
        sent: list[int] = []

        def counting(commands: Sequence[LineCommand], *, doing: str) -> list[bytes]:
            sent.extend(len(command.packet) for command in commands)  # noqa: B023 - called in this round only
            return send(commands, doing=doing)

        driver.send = counting  # type: ignore[method-assign]
        backend.apply([Change(key="", arrivals=members[-1:])])
        driver.send = send  # type: ignore[method-assign]
        cost[size] = sum(sent)
        assert name in [one.group_uuid for one in backend.ready_groups(9)]

    assert cost[40_000] < 2 * cost[1_000]  # bytes


def test_members_arriving_twice_in_many_threads_count_once(
    driver: MemcacheDriver,
) -> None:
    backend = MemcacheBackend(driver)

    def arrive(index: int) -> None:
        for number in range(50):
            backend.apply([Change(key="", arrivals=(arrival(f"m{number}_{index % 8}", 401),))])

    together(16, arrive)
    assert backend.ready_groups(9) == []
    backend.apply([Change(key="", arrivals=(arrival("last", 401),))])
    assert len(backend.ready_groups(9)) == 1


def test_runs_of_a_dead_process_are_found_and_then_forgotten(driver: MemcacheDriver) -> None:
    clock = ManualClock()
    driver.clock = clock
    dead, alive = MemcacheBackend(driver), MemcacheBackend(driver)
    settle(dead, "task_1")
    dead.init_group("g", ["a"])
    dead.apply([Change(key="a", states=(state("a"),), arrivals=(arrival("a", 1),))])

    clock.advance(3600.0)
    alive.tend()
    assert alive.unsent(9, older_than=5.0) == [("task_1", [b"message"])]
    assert [one.group_uuid for one in alive.ready_groups(9)] == ["g"]
    assert alive.trigger_chord("g") is True
    alive.clear_outbox([("task_1", [b"message"])])
    clock.advance(3600.0)
    alive.tend()

    assert alive._index.names() == set()


def test_entry_of_the_index_stays_while_another_change_has_it_open(driver: MemcacheDriver) -> None:
    clock = ManualClock()
    driver.clock = clock
    mine, reader = Index(driver), Index(driver)
    mine.note(outboxes=["task_1"])
    clock.advance(DEAD + 1.0)
    mine.note(outboxes=["task_1"])  # its next run has one as well

    mine.tend(())
    reader.tend(())

    assert reader.names() == {OpenName(False, "task_1")}
    mine.drop(outboxes=["task_1"])
    mine.tend(())
    assert reader.names() == set()


def test_index_of_a_busy_process_stays_short(driver: MemcacheDriver) -> None:
    index = Index(driver)
    index.note(outboxes=["open"])
    for number in range(300):
        index.note(outboxes=[f"task_{number}"])
        index.drop(outboxes=[f"task_{number}"])

    assert len(driver.fetch([index._key], doing="testing")[index._key].value) < 10_000
    assert OpenName(False, "open") in Index(driver).names()


def test_index_has_room_for_all_that_a_process_opens(driver: MemcacheDriver) -> None:
    index = Index(driver)
    groups = [f"group_{number:036}" for number in range(20_000)]  # of a queue that is purged
    for some in in_steps(groups, 500):
        index.note(groups=some)
        index.drop(groups=some[:1])
    index.tend(())

    assert {one.key for one in Index(driver).names()} >= {*groups} - {*groups[::500]}


# Limits


def test_a_result_that_is_too_large_is_refused_in_words(driver: MemcacheDriver) -> None:
    backend = MemcacheBackend(driver)
    large = TaskState(task_uuid="large", state=State.SUCCESS, results=(Arg.of("x" * 1_100_000),))
    small = Change(key="small", mark="m", states=(state("small"),))

    with pytest.raises(
        ArgumentError,
        match=r"the item 'large' has 11\d{5} bytes, more than memcached takes .*-I.*return less",
    ):
        backend.apply([small, Change(key="large", mark="m", states=(large,))])

    assert backend.apply([small]) == [ALREADY]
    assert backend.get_states(["large"]) == {}


def test_result_refused_by_memcached_becomes_a_dead_letter(
    empty_memcached: MemcachedServer,
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    repeat = server.register_task("repeat", lambda count: "x" * count)

    with server.new_worker(concurrency=2):
        large = repeat.send(
            1_048_300
        )  # less than max_result_size, and with the rest of the item more than 1 MiB
        small = [repeat.send(3) for _ in range(20)]
        assert [one.get(timeout=HANG) for one in small] == ["xxx"] * 20
        with pytest.raises(
            TaskFailed, match="the result cannot be stored: .*more than memcached takes"
        ):
            large.get(timeout=HANG)
    (letter,) = server.inspect.dead()
    assert (letter.uuid, letter.reason) == (large.uuid, "unstorable")
    assert "more than memcached takes" in letter.error
    server.close()


def test_too_large_group_is_refused_before_publishing(
    empty_memcached: MemcachedServer,
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    task = server.register_task("task", lambda number: number)

    with pytest.raises(ArgumentError, match="more than memcached takes"):
        group(task.signature(number) for number in range(30_000)).send()

    assert sum(one.waiting for one in server.broker.stats()) == 0
    server.close()


def test_chord_whose_results_are_too_large_together_fails(
    empty_memcached: MemcachedServer,
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    repeat = server.register_task("repeat", lambda count: "x" * count)
    total = server.register_task("total", lambda *parts: sum(map(len, parts)))

    with server.new_worker(concurrency=2):
        result = chord([repeat.signature(200_000) for _ in range(5)], total.partial()).send()
        with pytest.raises(
            TaskFailed, match="callback cannot be sent: .*more than memcached takes"
        ):
            result.get(timeout=HANG)
        small = chord([repeat.signature(2) for _ in range(5)], total.partial()).send()
        assert small.get(timeout=HANG) == 10
    assert server.backend.ready_groups(9) == []
    server.close()


def test_unsupported_question_is_refused_in_words(empty_memcached: MemcachedServer) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    task = server.register_task("task", lambda: 1)
    result = task.send()

    with pytest.raises(Unsupported, match="whole UUID"):
        server.inspect.tasks()
    with pytest.raises(StateNotFound):
        server.inspect.task(result.uuid[:9])
    assert server.inspect.task(result.uuid).state.state is State.PENDING
    assert [(one.waiting, one.failed, one.per_minute) for one in server.inspect.queues()] == [
        (1, 0, 0)
    ]
    server.close()


# A worker while memcached fails


class Shop:
    """A Server on a memory broker, with tasks and a worker."""

    def __init__(self, url: str) -> None:
        self.server = Server(Config(broker="memory://", result_backend=url, publish_timeout=HANG))
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.note: Task[[int], int] = self.server.register_task("note", self._note)
        self.total: Task[..., int] = self.server.register_task("total", self._total)

    def _note(self, number: int) -> int:
        self.calls.append(number)
        self.gate.wait(HANG)
        return number

    def _total(self, *numbers: int) -> int:
        self.calls.append(-1)
        return sum(numbers)

    def worker(self) -> Worker:
        return self.server.new_worker(concurrency=2, shutdown_timeout=HANG)

    def is_idle(self) -> bool:
        return not any(
            one.waiting or one.running or one.delayed for one in self.server.broker.stats()
        )


def test_memcached_that_restarts_empty_loses_no_task() -> None:
    require(MemcachedServer)
    with MemcachedServer() as memcached:
        shop = Shop(memcached.url)
        results = [shop.note.send(number) for number in range(20)]
        with shop.worker():
            wait_until(lambda: len(shop.calls) == 2, what="two tasks that run")
            memcached.kill()
            shop.gate.set()
            memcached.start()
            wait_until(shop.is_idle, what="all tasks are settled")
            assert sorted(set(shop.calls)) == list(range(20))
            assert shop.note.send(99).get(timeout=HANG) == 99
            for result in results[-5:]:
                assert result.get(timeout=HANG) in range(20)
        shop.server.close()


def test_sender_of_chords_is_warned_once_of_a_forgetting_backend(
    empty_memcached: MemcachedServer, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(empty_memcached.url)
    group(shop.note.signature(1), shop.note.signature(2)).send()
    (shop.note.signature(1) | shop.note.partial()).send()
    assert "chord" not in caplog.text
    for _ in range(2):
        (group(shop.note.signature(1), shop.note.signature(2)) | shop.total.partial()).send()

    [warning] = [one.message for one in caplog.records if one.name == "machinery_py.server"]
    assert "counted in memcache, which forgets when it restarts or is full" in warning
    shop.server.close()

    quiet = Server("memory://")
    note = quiet.register_task("note", abs)
    (group(note.signature(1), note.signature(2)) | note.partial()).send()
    quiet.close()
    assert len([one for one in caplog.records if one.name == "machinery_py.server"]) == 1


def test_waiter_for_a_forgotten_result_is_told(empty_memcached: MemcachedServer) -> None:
    shop = Shop(empty_memcached.url)
    result = shop.note.send(1)
    empty_memcached.flush()
    with pytest.raises(ResultExpired):
        result.get(timeout=HANG)
    shop.server.close()


@pytest.mark.parametrize("fault", ["freeze", "stop"])
def test_a_worker_outlives_an_outage_of_one_server_of_two(
    fault: str, empty_memcached: MemcachedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with MemcachedServer() as other:
        shop = Shop(f"{empty_memcached.url},127.0.0.1:{other.port}")
        results = [shop.note.send(number) for number in range(20)]
        with shop.worker():
            wait_until(lambda: len(shop.calls) == 2, what="two tasks that run")
            getattr(other, fault)()
            shop.gate.set()
            wait_until(lambda: f":{other.port}: " in caplog.text, what="the worker has noticed")
            (other.thaw if fault == "freeze" else other.start)()
            wait_until(shop.is_idle, what="all tasks are settled")
        # A claim that could not be begun goes back, so nothing ran twice.
        assert sorted(shop.calls) == list(range(20))
        if fault == "freeze":
            assert [result.get(timeout=HANG) for result in results] == list(range(20))
        shop.server.close()


def test_a_memcached_that_evicts_loses_no_task_and_stops_no_worker() -> None:
    require(MemcachedServer)
    with MemcachedServer(megabytes=1) as memcached:
        shop = Shop(memcached.url)
        shop.gate.set()
        filler = MemcacheDriver(parse_memcache_url(memcached.url))
        backend = MemcacheBackend(filler)
        stop = threading.Event()

        def fill() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                uuid = f"filler_{number}"
                results = (Arg.of("x" * 3000),)
                backend.apply(
                    [
                        Change(
                            key=uuid,
                            states=(
                                TaskState(task_uuid=uuid, state=State.SUCCESS, results=results),
                            ),
                        )
                    ]
                )

        thread = threading.Thread(target=fill, name="filler")
        thread.start()
        try:
            with shop.worker():
                for number in range(300):
                    shop.note.send(number)
                chord(
                    group(shop.note.signature(number) for number in range(300, 310)),
                    shop.total.partial(),
                ).send()
                wait_until(shop.is_idle, what="all tasks are settled")
                wait_until(lambda: {*range(310)} <= set(shop.calls), what="every task has run")
        finally:
            stop.set()
            thread.join(HANG)
        filler.close()
        shop.server.close()


def test_a_lost_group_document_does_not_keep_others_from_firing(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    shop = Shop(empty_memcached.url)
    broken = chord(
        group(shop.note.signature(number) for number in (1, 2)), shop.total.partial()
    ).send()
    backend = MemcacheBackend(driver)
    uuids = [state.task_uuid for state in backend.group_task_states(broken.group.uuid)]
    driver.send([delete(key_of(broken.group.uuid))], doing="testing")
    assert len(uuids) == 2
    shop.gate.set()
    with shop.worker():
        whole = chord(
            group(shop.note.signature(number) for number in (3, 4)), shop.total.partial()
        ).send()
        assert whole.get(timeout=HANG) == 7
        wait_until(lambda: not backend.ready_groups(9), what="both are settled")
    assert shop.calls.count(-1) == 1
    shop.server.close()
