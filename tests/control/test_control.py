"""Orders and answers over the memory store: what is refused, cut, or comes from a stranger."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from machinery_py import (
    ArgumentError,
    Config,
    MachineryError,
    Server,
    State,
    TaskFailed,
    current_task,
)
from machinery_py.brokers.topics import MAX_RECORD
from machinery_py.control import client
from machinery_py.control.answers import Answers
from machinery_py.control.client import Control
from machinery_py.control.lamport import MOST_RECEIVED
from machinery_py.control.orders import (
    KINDS,
    MOST_BYTES,
    ORDERS,
    Answer,
    contains,
    decode_answer,
    decode_order,
    encode_answer,
    matches,
)
from machinery_py.errors import (
    BrokerUnavailable,
    StoreUnusable,
    Unsupported,
    for_good,
)
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.control.steering import Steering
from machinery_py.worker.loops import receiver
from machinery_py.worker.worker import Worker

ID = "0123456789abcdef" * 2


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    config = Config(broker="memory://", lock="redis://:secret@host/1")
    with contextlib.closing(Server(config)) as server:
        yield server


def answered(server: Server, *records: bytes, topic: str = ORDERS) -> list[Answer]:
    """Return the answers to records that were sent before a ping of ours was answered."""
    with contextlib.closing(server.broker.subscribe(f"replies.{ID}")) as replies:
        server.broker.broadcast(topic, records, ttl=HANG)
        assert server.control.ping(timeout=HANG)
        return [decode_answer(record) for record in replies.read(0.0)]


def order(**changes: Any) -> bytes:
    return json.dumps({"id": ID, "kind": "ping", "to": [], "args": {}} | changes).encode()


DEEP = b"[" * 30_000 + b"]" * 30_000
UNREADABLE = (
    b"",
    b"\xff\x00",
    b"[" * MAX_RECORD,
    b'{"id": "' + b"a" * (MAX_RECORD - 9),
    order(id="orders"),
    order(id=ID + "\n"),
    order(id=7),
    order(kind=[]),
    order(to="ada"),
    order(to=[None]),
    order(to=["x"] * 1001),
    order(args=[1]),
    order(clock=2**63),
    order(clock=-1),
    b'{"id": "' + ID.encode() + b'", "kind": "ping", "args": {"a": ' + DEEP + b"}}",
)
HOSTILE = (
    *UNREADABLE,
    order(kind="rm -rf"),
    order(kind="__class__"),
    order(to=["nobody"]),
    order(to=["*a" * 20_000]),
    order(to=["a*"], clock=MOST_RECEIVED),
)


def test_hostile_orders_are_ignored_and_told_once_a_minute(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Who writes to the topic cannot end, slow or lead astray a worker."""
    with server.new_worker("ada", 1), caplog.at_level(logging.WARNING):
        assert [one.clock for one in answered(server, *HOSTILE)] == [MOST_RECEIVED + 2]
        assert [one.worker for one in answered(server, order(to=["a*"]))] == ["ada"]

    [told] = [one.getMessage() for one in caplog.records]
    assert told.startswith("order ignored: a record of 0 bytes is no order")


@pytest.mark.parametrize("record", UNREADABLE)
def test_record_that_is_no_order_is_not_read(record: bytes) -> None:
    with pytest.raises(ValueError):
        decode_order(record)


def test_wrong_arguments_are_answered_with_the_error(server: Server) -> None:
    with server.new_worker("ada", 1):
        [answer] = answered(server, order(args={"loud": True}))

    assert answer.error == "order 'ping': Object contains unknown field `loud`"


def test_order_that_fails_is_told_and_the_agent_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RuntimeError("broken"), TimeoutError()]

    def fail(*_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(Steering, "_stats", fail)
    with server.new_worker("ada", 1):
        for text in ("broken", "TimeoutError"):
            stats = server.control.workers().stats()
            assert (stats, stats.missing) == ({}, ())
            assert stats.errors == {"ada": text}
        assert set(server.control.ping()) == {"ada"}


def test_answer_that_cannot_be_encoded_is_told(server: Server) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="\udc80", daemon=True)
    thread.start()
    with server.new_worker("ada", 1):
        assert "surrogates not allowed" in server.control.workers().stack().errors["ada"]
        assert set(server.control.ping()) == {"ada"}
    done.set()


def test_stats_count_what_runs_has_ended_and_failed(server: Server) -> None:
    gate = threading.Event()
    hold = server.register_task("hold", lambda: gate.wait(HANG))
    fail = server.register_task("fail", lambda: 1 // 0)
    with server.new_worker("ada", 2) as worker:
        running = hold.send()
        with pytest.raises(TaskFailed):
            fail.send().get(timeout=HANG)
        wait_until(lambda: worker.processed == 1)
        stats = server.control.workers(timeout=HANG).stats()["ada"]
        assert (stats.active, stats.processed, stats.failed) == (1, 1, 1)
        assert stats.oldest > 0
        gate.set()
        assert running.get(timeout=HANG)
        wait_until(lambda: worker.processed == 2 and not worker.active)
        stats = server.control.workers(timeout=HANG).stats()["ada"]
        assert (stats.active, stats.oldest, stats.processed, stats.failed) == (0, 0.0, 2, 1)


def test_configuration_is_told_without_its_secrets(server: Server) -> None:
    with server.new_worker("ada", 1):
        config = server.control.workers().config()["ada"]

    assert "host/1" in config["lock"]
    assert "secret" not in str(config)


def test_answers_of_strangers_are_left_out(server: Server) -> None:
    def of(record: bytes) -> Answers[Any]:
        broadcast = server.broker.broadcast

        def with_more(topic: str, records: list[bytes], *, ttl: float) -> None:
            broadcast(topic, records, ttl=ttl)
            if topic == ORDERS:
                replies = "replies." + json.loads(records[0])["id"]
                broadcast(replies, [record], ttl=ttl)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.broker, "broadcast", with_more)
            return server.control.workers().stats()

    head = b'{"worker": "eve", "host": "h", "pid": 1, "value": '
    bomb = zlib.compress(head + b" " * 2 * MOST_BYTES + b"1}")
    with server.new_worker("ada", 1):
        for record in (b"", b"[]", head[:-2], b"\xff", bomb, bomb[:-9]):
            answers = of(record)
            assert (set(answers), answers.errors) == ({"ada"}, {})
        answers = of(head + b'{"concurrency": "many"}}')
        assert (set(answers), set(answers.errors)) == ({"ada"}, {"eve"})
        answers = of(head + DEEP + b"}")
        assert set(answers) == {"ada"}
        assert set(answers.errors) <= {"eve"}  # Python 3.14 reads deeper than others before it


def test_workers_of_one_name_are_told_apart(server: Server) -> None:
    records = [encode_answer(Answer(worker="ada", host="elsewhere", pid=7))]
    with server.new_worker("ada", 1), server.new_worker("bob", 1):
        workers = server.control.workers()
        broadcast = server.broker.broadcast

        def with_more(topic: str, sent: list[bytes], *, ttl: float) -> None:
            if topic == ORDERS:
                broadcast("replies." + json.loads(sent[0])["id"], records, ttl=ttl)
            broadcast(topic, sent, ttl=ttl)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.broker, "broadcast", with_more)
            names = set(workers.ping())

    assert {"ada@elsewhere:7", "bob"} < names
    assert len(names) == 3


def test_worker_without_control_is_missing(server: Server) -> None:
    server.app.config = server.config.replace(control=False)
    with server.new_worker("ada", 1):
        answers = server.control.ping(timeout=0.05)

    assert (answers, answers.missing) == ({}, ("ada",))


def test_worker_starts_when_it_cannot_subscribe_to_orders(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subscribe, tries = server.broker.subscribe, []

    def fail_first(topic: str, **given: float) -> Any:
        tries.append(topic)
        if len(tries) == 1:
            raise BrokerUnavailable("away")
        return subscribe(topic, **given)

    monkeypatch.setattr(server.broker, "subscribe", fail_first)
    with server.new_worker("ada", 1) as worker:
        wait_until(lambda: worker.name in server.control.ping(timeout=0.1))

    assert "orders" not in caplog.text  # else each attempt to reconnect adds a line


def test_refusal_for_good_to_receive_orders_is_warned_of(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise for_good(StoreUnusable("no right to read the topic"))

    monkeypatch.setattr(server.broker, "subscribe", refuse)
    with server.new_worker("ada", 1):
        wait_until(lambda: "no orders can be received: no right to read" in caplog.text)


def test_worker_answers_while_a_change_takes_long(server: Server) -> None:
    """As when an app is imported, or a hook of the user hangs; a second change is refused."""
    hangs, gate = threading.Event(), threading.Event()

    def hang(_: Worker) -> bool:
        hangs.set()
        return gate.wait(HANG)

    worker = server.new_worker("ada", 1)
    worker.set_pre_consume_handler(hang)
    workers = server.control.workers("ada", timeout=HANG)
    with worker, ThreadPoolExecutor() as pool:
        assert hangs.wait(HANG)
        first = pool.submit(workers.set_concurrency, 3)
        wait_until(lambda: any(one.name == "ada-change" for one in threading.enumerate()))
        assert set(workers.ping()) == {"ada"}
        with pytest.raises(MachineryError, match="ada: another change is being made"):
            workers.set_concurrency(4)
        gate.set()
        first.result(HANG)
        workers.set_concurrency(5)
    with worker:
        assert workers.stats()["ada"].concurrency == 5


def test_change_that_is_not_made_in_time_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, gate = threading.Event(), threading.Event()

    def hang(_: object) -> bool:
        hangs.set()
        return gate.wait(HANG)

    worker = server.new_worker("ada", 1)
    monkeypatch.setattr(receiver, "CHANGE_TIMEOUT", 0.1)
    with worker:
        monkeypatch.setattr(worker._live.executors, "resize", hang)
        with pytest.raises(MachineryError, match="not done after 0.2 s; it may be done later"):
            worker.resize(3)
        assert hangs.is_set()
        with pytest.raises(MachineryError, match="come to it in 0.1 s; nothing was changed"):
            worker.resize(4)
        gate.set()


def test_large_answer_is_compressed_or_becomes_an_error() -> None:
    text = msgspec.json.encode("é" * MAX_RECORD)
    large = encode_answer(Answer(worker="ada", host="h", pid=1, value=msgspec.Raw(text)))
    assert len(large) <= MAX_RECORD
    assert bytes(decode_answer(large).value) == text

    for value in (os.urandom(MAX_RECORD).hex(), "x" * MOST_BYTES):
        text = msgspec.json.encode(value)
        refused = encode_answer(Answer(worker="ada", host="h", pid=1, value=msgspec.Raw(text)))
        assert "(at most" in decode_answer(refused).error


@pytest.mark.parametrize(
    ("name", "patterns", "fits"),
    [
        ("web-1", [], True),
        ("web-1", ["web-1"], True),
        ("web-1", ["web", "mail"], False),
        ("web-1", ["mail", "web-*"], True),
        ("web-1", ["*1"], True),
        ("web-1", ["*"], True),
        ("web-1", ["w*b*1"], True),
        ("web-1", ["w*1*1"], False),
        ("web-1", ["web-1*1"], False),
        ("web-1", ["w?b-1"], False),
        ("web-1", ["[w]eb-1"], False),
        ("a" * 10_000, ["*a" * 5_000 + "b"], False),
    ],
)
def test_star_in_a_name_stands_for_any_text(name: str, patterns: list[str], fits: bool) -> None:
    assert matches(name, patterns) is fits


def test_every_order_has_a_function_and_a_method(server: Server) -> None:
    handlers = Steering.handlers

    assert set(KINDS) == set(handlers(_Bare()))
    assert set(KINDS) <= set(dir(server.control.workers()))


class _Bare(Steering):
    def __init__(self) -> None:
        pass


def test_weighted_queues_are_added_and_cancelled(server: Server) -> None:
    with server.new_worker("ada", 1, queues={"a": 5, "b": 2}) as worker:
        workers = server.control.workers("ada")
        workers.add_queue("c")
        workers.add_queue("c")
        workers.cancel_queue("a")
        workers.cancel_queue("a")

        found = workers.queues()["ada"]
        assert [(one.name, one.weight) for one in found] == [("b", 2.0), ("c", 1.0)]
        assert worker.queues == ("b", "c")


def test_time_limit_events_and_log_level_are_set(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logging.getLogger("machinery_py")
    monkeypatch.setattr(ours, "level", ours.level)
    task = server.register_task("nap", lambda: None)
    with server.new_worker("ada", 1):
        workers = server.control.workers()
        workers.set_time_limit("nap", 2.5)
        assert task.settings.time_limit == 2.5
        workers.set_time_limit("nap", None)
        assert task.settings.time_limit is None
        workers.enable_events()
        assert workers.stats()["ada"].events
        workers.disable_events()
        assert not workers.stats()["ada"].events
        workers.log_level("error")
        assert ours.level == logging.ERROR
        ours.setLevel(logging.NOTSET)


def test_stopping_worker_ends_its_tasks_answers_and_takes_no_change(server: Server) -> None:
    gate = threading.Event()
    hold = server.register_task("hold", lambda: gate.wait(HANG))
    worker = server.new_worker("ada", 1)
    launched = worker.launch_async()
    try:
        held = hold.send()
        wait_until(lambda: set(server.control.ping(timeout=0.1)) == {"ada"} and worker.active == 1)
        workers = server.control.workers("ada", timeout=HANG)
        workers.shutdown()
        wait_until(worker._live.receiver.loop.is_stopping)
        workers.shutdown()
        assert [one.uuid for one in workers.active()["ada"]] == [held.uuid]
        with pytest.raises(MachineryError, match="ada: this worker is stopping"):
            workers.set_concurrency(2)
    finally:
        gate.set()
    launched.join(HANG)
    assert held.get(timeout=HANG) is True
    assert server.control.ping() == {}


def test_terminated_task_in_a_thread_is_asked_and_a_deaf_worker_named(server: Server) -> None:
    def hold() -> str:
        wait_until(lambda: current_task().cancelled)
        return "stopped"

    task = server.register_task("hold", hold)
    consumer = server.broker.consume(["other"], worker="deaf")
    with server.new_worker("ada", 1):
        held = task.send()
        wait_until(lambda: held.get_state().state is State.STARTED)  # else it is one that waits
        done = server.control.revoke(held.uuid, terminate=True, timeout=2.0)
        assert (done, done.missing) == ({"ada": {held.uuid: "asked"}}, ("deaf",))
        assert held.get(timeout=HANG) == "stopped"
        many = [f"task_{number}" for number in range(1001)]
        with pytest.raises(ArgumentError, match="length <= 1000"):
            server.control.revoke(*many, terminate=True)
        assert not server.backend.revoked(many)
        long = [f"task_{number:090}" for number in range(1000)]  # two records
        done = server.control.revoke(*long, terminate=True, timeout=2.0)
        assert (done, done.missing, done.errors) == ({"ada": {}}, ("deaf",), {})
    consumer.close()


def test_call_in_a_batch_is_left_unless_all_its_calls_are_terminated(server: Server) -> None:
    @server.task(batch=2, batch_within=HANG)
    def hold(rows: list[int]) -> list[int]:
        wait_until(lambda: current_task().cancelled)
        return rows

    with server.new_worker("ada", 1):
        first, second = hold.send(1), hold.send(2)
        both = first, second
        wait_until(lambda: all(one.get_state().state is State.STARTED for one in both))
        left = server.control.revoke(first.uuid, terminate=True)
        assert left == {"ada": {first.uuid: "left"}}
        asked = server.control.revoke(first.uuid, second.uuid, terminate=True)
        assert asked == {"ada": {first.uuid: "asked", second.uuid: "asked"}}
        assert [one.get(timeout=HANG) for one in both] == [1, 2]


def test_headers_to_revoke_by_must_be_few_plain_and_short(server: Server) -> None:
    many = {f"{number}{'x' * 240}": "\0" * 250 for number in range(20)}
    revoke = server.control.revoke
    hostile: list[Any] = [
        {},
        {**many, "one": "more"},
        {"x" * 251: 1},
        {"x": "y" * 251},
        {"x": "\ud800"},
        {"x": math.nan},
        {"x": 2**63},
        {"x": ["y"]},
        {1: "y"},
        "x=y",
    ]
    waiting = server.register_task("note", lambda: None).options(queue="idle").send()
    with server.new_worker("ada", 1):
        for headers in hostile:
            with pytest.raises(ArgumentError, match="order 'find'"):
                revoke(headers=headers)
        with pytest.raises(ArgumentError, match="UUIDs and headers"):
            revoke("task_1", headers={"x": "y"})
        assert not server.backend.revoked([waiting.uuid])
        [answer] = answered(server, order(kind="find", args={"headers": {}}))
        assert "length >= 1" in answer.error
        done = revoke(headers=many, timeout=HANG)
        assert (done.uuids, done.missing, done.errors) == ((), (), {})


def test_value_of_a_header_is_compared_exactly() -> None:
    headers = {"a": 1, "b": True, "c": None}
    for wanted in ({"a": 1}, {"a": 1.0}, {"b": True, "c": None}):
        assert contains(headers, wanted)
    for wanted in ({"a": True}, {"a": "1"}, {"b": 1}, {"d": None}, {"a": 1, "b": False}):
        assert not contains(headers, wanted)


def test_revoking_by_headers_is_refused_when_too_many_tasks_wait(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_LISTED", 2)
    task = server.register_task("note", lambda: None)
    for delay in (None, 3600.0):
        sent = [task.options(headers={"a": "b"}, delay=delay).send() for _ in "123"]
        with pytest.raises(Unsupported, match=r"3 (in queue 'machinery_tasks'|delayed)"):
            server.control.revoke(headers={"a": "b"})
        assert not server.backend.revoked([one.uuid for one in sent])
        server.inspect.purge("machinery_tasks")


def test_task_that_comes_back_after_the_first_look_is_revoked(server: Server) -> None:
    """As a retry does: the queue was read before, and the worker is asked after it."""
    task = server.register_task("note", lambda: None)
    sent = [task.options(headers={"a": "b"}).send().uuid]

    def revoke(uuids: Sequence[str]) -> None:
        if len(sent) < 2:
            sent.append(task.options(headers={"a": "b"}).send().uuid)
        server.revoke(uuids)

    control = Control(lambda: server.broker, server.app.lamport, revoke, lambda *_: None)
    assert sorted(control.revoke(headers={"a": "b"}).uuids) == sorted(sent)


def test_change_that_a_worker_refuses_is_an_error(server: Server) -> None:
    with server.new_worker("ada", 1, autoscale=(1, 2)):
        workers = server.control.workers("*", "gone")
        for act, text in (
            (lambda: workers.set_concurrency(3), "ada: worker ada scales itself"),
            (lambda: workers.set_concurrency(0), "Expected `int` >= 1"),
            (lambda: workers.set_time_limit("unknown", 1), "ada: .*'unknown' is not registered"),
            (lambda: workers.set_time_limit("unknown", math.nan), "Expected `float` > 0"),
            (lambda: workers.add_queue("a" * 5000), "ada: "),
            (workers.restart_pool, "ada: no task of this worker runs in a process"),
            (lambda: workers.log_level("loud"), "Invalid enum value 'LOUD'"),
            (workers.enable_events, r"gone: no answer in .* \(done by ada\)"),
        ):
            with pytest.raises(MachineryError, match=f"^order '.*': .*{text}"):
                act()
    with pytest.raises(MachineryError, match="there is no such worker"):
        server.control.workers().enable_events()


def test_call_that_makes_no_sense_is_refused(server: Server) -> None:
    control = server.control
    for timeout in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ArgumentError, match="timeout: found"):
            control.workers(timeout=timeout)
    for act, text in (
        (lambda: control.workers(*["a"] * 1001), "found 1,001 names"),
        (lambda: control.workers("a", "\udcff*"), "half a surrogate pair"),
        (lambda: control.workers().add_queue("\udcff"), "surrogates not allowed"),
        (lambda: control.workers().change("rm"), "order 'rm': there is no such order"),
        (lambda: control.revoke("ok", "\udcff", terminate=True), "surrogates not allowed"),
        (lambda: control.revoke("ok", "\udcff"), "half a surrogate pair"),
    ):
        with pytest.raises(ArgumentError, match=text):
            act()
    assert not server.backend.revoked(["ok"])


def test_order_and_answer_carry_the_clocks_of_their_processes() -> None:
    """L05, L12, L13: an answer that names no clock counts as 0."""
    own, asking = Server("memory://clocks"), Server("memory://clocks")
    with contextlib.closing(own), contextlib.closing(asking), own.new_worker("ada", 1):
        asking.app.lamport.adjust(100)
        pong = asking.control.ping(timeout=HANG)["ada"]
        assert 101 < pong.clock == own.app.lamport.value < asking.app.lamport.value

        own.app.lamport.adjust(1000)
        assert asking.control.ping(timeout=HANG)["ada"].clock < asking.app.lamport.value

    assert decode_answer(b'{"worker": "eve", "host": "h", "pid": 1}').clock == 0
