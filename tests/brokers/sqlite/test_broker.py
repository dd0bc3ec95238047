"""What is SQLite's own of the broker: several processes, and how the death of one is seen."""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py.brokers.base import Disposal, Fate, Message
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import StoreUnusable
from machinery_py.rows.sqlite_messages import BIG
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.stores.sqlite.processes import Other
from tests.support.freezing import stands_still

CONSUME = "consumer = broker.consume(['q'], worker='other')\n"
HOLD = (
    CONSUME
    + """
held = consumer.receive(10, 30)
for one in held[:2]:
    consumer.run_begins(one)
if len(held) > 1:
    consumer.run_ends(held[1])
say(len(held))
heard()
"""
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machinery.db"


@pytest.fixture
def broker(path: Path) -> Iterator[SQLiteBroker]:
    broker = SQLiteBroker(SQLiteDriver(path))
    yield broker
    broker.close()
    broker.driver.close()


def message(
    number: int = 0, *, queue: str = "q", eta: dt.datetime | None = None, body: bytes = b""
) -> Message:
    return Message(uuid=str(number), name="add", queue=queue, body=body or b"%d" % number, eta=eta)


def put(broker: SQLiteBroker, count: int = 1) -> None:
    broker.put([message(number) for number in range(count)], token="")


def read_all(other: Other) -> list[str]:
    words = other.line().split()
    assert other.end() == 0
    return words


# Several processes


def test_four_processes_claim_each_message_once(broker: SQLiteBroker, path: Path) -> None:
    put(broker, 4000)
    script = (
        CONSUME
        + """
heard()
taken = []
while found := consumer.receive(37, 0.2):
    assert all(consumer.dispose([Disposal(delivery=one) for one in found]))
    taken += [one.body.decode() for one in found]
say(*taken)
"""
    )
    others = [Other(path, script) for _ in range(4)]
    for other in others:
        other.tell()
    taken = [word for other in others for word in read_all(other)]

    assert sorted(taken, key=int) == [str(number) for number in range(4000)]
    assert [(line.waiting, line.running) for line in broker.stats()] == [(0, 0)]


def test_message_of_another_process_wakes_a_waiting_consumer(
    broker: SQLiteBroker, path: Path
) -> None:
    consumer = broker.consume(["q"], worker="w")
    script = """
for n in range(20):
    heard()
    broker.put([Message(uuid='', name='', queue='q', body=b'')], token='')
"""
    with Other(path, script) as other:
        for _ in range(20):
            started = time.monotonic()
            other.tell()
            (delivery,) = consumer.receive(1, HANG)
            assert time.monotonic() - started < HANG / 2
            consumer.dispose([Disposal(delivery=delivery)])


def test_a_delayed_message_wakes_a_sleeper_by_itself(broker: SQLiteBroker) -> None:
    consumer = broker.consume(["q"], worker="w")
    other = broker.consume(["other"], worker="w")
    soon = broker.driver.clock.now() + dt.timedelta(seconds=0.2)
    broker.put([message(1, eta=soon), message(2, queue="other", eta=soon)], token="")

    found = together(2, lambda index: (consumer, other)[index].receive(1, HANG))

    assert [[one.body for one in deliveries] for deliveries in found] == [[b"1"], [b"2"]]
    assert broker.driver.clock.now() >= soon


def test_an_idle_consumer_writes_nothing(broker: SQLiteBroker) -> None:
    consumer = broker.consume(["q"], worker="w")
    broker.tend()
    consumer.beat()
    log = Path(broker.driver.path + "-wal")
    before = log.read_bytes()

    assert consumer.receive(10, 0.05) == []
    assert consumer.holds([]) == []
    broker.tend()
    assert consumer.beat() is True

    assert log.read_bytes() == before


def test_big_bodies_come_as_they_went(broker: SQLiteBroker) -> None:
    bodies = [bytes([number]) * (BIG + number - 3) for number in range(6)]
    broker.put([message(number, body=body) for number, body in enumerate(bodies)], token="")
    assert [one.body for one in broker.consume(["q"], worker="w").receive(10, 0)] == bodies


def test_texts_without_utf_8_are_kept_readable(broker: SQLiteBroker) -> None:
    put(broker)
    consumer = broker.consume(["q"], worker="w\udcff")
    (delivery,) = consumer.receive(1, 0)
    consumer.dispose([Disposal(delivery=delivery, fate=Fate.DEAD, error="caf\udce9")])
    assert [letter.error for letter in broker.dead_letters(limit=5)] == ["caf\\udce9"]
    assert [worker.name for worker in broker.workers()] == ["w\\udcff"]


# Life and death


def test_deliveries_of_a_killed_process_come_back_at_once(broker: SQLiteBroker, path: Path) -> None:
    put(broker, 3)
    with Other(path, HOLD) as other:
        assert other.line() == "3"
        assert broker.reap() == 0
        assert [worker.holding for worker in broker.workers()] == [3]
        assert broker.tend() <= 0.5
        other.kill()

        assert broker.workers() == []
        assert broker.reap() == 1
        assert broker.reap() == 0

    found = broker.consume(["q"], worker="w").receive(10, 0)
    assert [(one.body, one.strikes) for one in found] == [
        (b"0", 1),
        (b"1", 0),
        (b"2", 0),
    ]  # it ran the first
    assert len(os.listdir(broker.driver.sessions_folder)) == 1


def test_the_death_of_a_process_wakes_a_sleeper(broker: SQLiteBroker, path: Path) -> None:
    put(broker)
    consumer = broker.consume(["q"], worker="w")
    with Other(path, HOLD) as other:
        assert other.line() == "1"

        def work(index: int) -> int:
            if index:
                other.kill()
                wait_until(broker.reap)
                return 0
            return len(consumer.receive(1, HANG))

        assert together(2, work) == [1, 0]


def test_late_heartbeat_of_a_live_process_loses_nothing(path: Path) -> None:
    clock = ManualClock()
    broker = SQLiteBroker(SQLiteDriver(path, clock=clock))
    put(broker)
    with Other(path, HOLD) as other:
        assert other.line() == "1"
        clock.advance(days=9000)
        assert [broker.reap() for _ in range(5)] == [0] * 5
        assert len(broker.workers()) == 1


def test_stopped_process_is_dead_at_a_later_poll_and_fenced(path: Path) -> None:
    clock = ManualClock(dt.datetime.now(dt.timezone.utc))
    broker = SQLiteBroker(SQLiteDriver(path, clock=clock), lease=10.0)
    put(broker)
    script = (
        CONSUME
        + """
(one,) = consumer.receive(10, 30)
say('holds')
heard()
say(consumer.dispose([Disposal(delivery=one)]), consumer.beat(), consumer.beat())
"""
    )
    with Other(path, script) as other:
        assert other.line() == "holds"
        os.kill(other.pid, signal.SIGSTOP)
        wait_until(lambda: stands_still(other.pid))
        assert [broker.reap() for _ in range(3)] == [0, 0, 0]
        clock.advance(hours=1)  # the other told the real time, however long it took to start
        assert [broker.reap() for _ in range(3)] == [0, 0, 0]
        clock.advance(10.0)
        assert [broker.reap() for _ in range(2)] == [1, 0]
        heir = broker.consume(["q"], worker="heir")
        (delivery,) = heir.receive(1, 0)
        assert delivery.strikes == 0  # it held it, and did not run it

        os.kill(other.pid, signal.SIGCONT)
        other.tell()
        assert other.line() == "[False] False True"
        assert heir.holds([delivery]) == [True]


def test_process_that_resumes_after_the_first_poll_is_alive(path: Path) -> None:
    clock = ManualClock(dt.datetime.now(dt.timezone.utc))
    broker = SQLiteBroker(SQLiteDriver(path, clock=clock), lease=10.0)
    put(broker)
    with Other(path, HOLD) as other:
        assert other.line() == "1"
        clock.advance(hours=1)  # the other told the real time, however long it took to start
        for _ in range(2):
            os.kill(other.pid, signal.SIGSTOP)
            wait_until(lambda: stands_still(other.pid))
            assert broker.reap() == 0
            os.kill(other.pid, signal.SIGCONT)
            wait_until(lambda: not stands_still(other.pid))
            assert broker.reap() == 0


def test_a_forked_child_does_not_keep_its_parent_alive(broker: SQLiteBroker, path: Path) -> None:
    put(broker)
    script = (
        CONSUME
        + """
say(len(consumer.receive(10, 30)))
if os.fork() == 0:
    consumer.close()  # as cleaning up in a child may do: it is not the child's to close
    say('child')
    heard()
    os._exit(0)
heard()
"""
    )
    with Other(path, script) as other:
        assert (other.line(), other.line()) == ("1", "child")
        assert broker.reap() == 0
        assert [worker.holding for worker in broker.workers()] == [1]
        os.kill(other.pid, signal.SIGKILL)
        other.process.wait()

        assert broker.reap() == 1
        other.tell()
    assert len(broker.pending("q", 5)) == 1


def test_a_forked_child_sees_its_parent_alive(broker: SQLiteBroker, path: Path) -> None:
    put(broker)
    consumer = broker.consume(["q"], worker="w")
    (delivery,) = consumer.receive(1, 0)
    child = os.fork()
    if child == 0:
        try:
            os._exit(10 + broker.reap())
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert consumer.holds([delivery]) == [True]
    assert consumer.beat() is True


def test_session_with_a_deleted_file_is_judged_by_its_heartbeat(path: Path) -> None:
    clock = ManualClock(dt.datetime.now(dt.timezone.utc))
    broker = SQLiteBroker(SQLiteDriver(path, clock=clock), lease=10.0)
    put(broker)
    with Other(path, HOLD) as other:
        assert other.line() == "1"
        for name in os.listdir(broker.driver.sessions_folder):
            os.unlink(os.path.join(broker.driver.sessions_folder, name))
        assert [broker.reap() for _ in range(3)] == [0, 0, 0]
        clock.advance(hours=1)  # the other told the real time, however long it took to start
        assert [broker.reap() for _ in range(3)] == [0, 0, 0]
        clock.advance(10.0)
        assert [broker.reap() for _ in range(2)] == [1, 0]


def test_garbage_collected_consumer_is_dead(broker: SQLiteBroker) -> None:
    put(broker)
    consumer = broker.consume(["q"], worker="w")
    assert len(consumer.receive(1, 0)) == 1
    assert broker.reap() == 0
    del consumer

    assert broker.reap() == 1
    assert len(broker.pending("q", 5)) == 1


def test_files_of_unknown_sessions_are_removed(broker: SQLiteBroker) -> None:
    consumer = broker.consume(["q"], worker="w")
    folder = Path(broker.driver.sessions_folder)
    for name, age in (("old", 3600), ("new", 0)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age, time.time() - age))

    broker.tend()

    assert set(os.listdir(folder)) == {"new", consumer.session}


def test_closing_without_the_file_warns_of_a_dead_consumer(
    broker: SQLiteBroker,
) -> None:
    consumer = broker.consume(["q"], worker="w")
    Path(broker.driver.path).unlink()

    with pytest.raises(StoreUnusable, match="deleted"):
        consumer.close()
    consumer.close()


@pytest.mark.parametrize("claims", [False, True], ids=["maintenance", "a claim"])
def test_very_many_that_are_due_come_in_steps(path: Path, claims: bool) -> None:
    clock = ManualClock()
    broker = SQLiteBroker(SQLiteDriver(path, clock=clock))
    eta = clock.now() + dt.timedelta(seconds=5)
    broker.put([message(number, eta=eta) for number in range(10_001)], token="")
    clock.advance(6.0)

    if not claims:
        assert broker.next_due() == 0.0  # there are more
        assert broker.next_due() > 0.0
        assert [(one.waiting, one.delayed) for one in broker.stats()] == [(10_001, 0)]
    found = broker.consume(["q"], worker="w").receive(3, 0)
    assert [one.body for one in found] == [b"0", b"1", b"2"]
    assert [(one.waiting, one.delayed) for one in broker.stats()] == [(9_998, 0)]
    broker.driver.close()
