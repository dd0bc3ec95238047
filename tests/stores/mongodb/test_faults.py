"""MongoDB's faults: lost replies, a primary that steps down, a server away, Go's documents."""

from __future__ import annotations

import collections
import datetime as dt
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pymongo.monitoring
import pytest
from bson.int64 import Int64
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    ServerSelectionTimeoutError,
)

from machinery_py import Config, Server
from machinery_py.backends.base import ALREADY, SETTLED, Change, Rider
from machinery_py.backends.mongodb import groups as mongo_groups
from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.backends.mongodb.documents import go_value
from machinery_py.brokers.base import Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.connections.mongodb import errors as mongo_errors
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    ConfigError,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.locks.mongodb import MongoLock
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Firing, Mark, Store, Submission
from machinery_py.stores.mongodb import MongoStore
from machinery_py.stores.outbox import TwoStores
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import Arrival, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import claim
from machinery_py.testing.conformance.fencing import (
    arrival,
    drain,
    message_of,
    settlement,
    state_of,
    submit,
)
from machinery_py.testing.waiting import HANG
from tests.support import private_mongo
from tests.support.proxy import Proxy

WRITES = (b"insert", b"update", b"delete", b"findAndModify")
FAULTS = ("lost reply", "stepped down", "stepped down after it")


@pytest.fixture
def proxy(mongodb_url: str) -> Iterator[Proxy]:
    host = mongodb_url.partition("://")[2].partition("/")[0]
    if not host.startswith("127.0.0.1:"):
        pytest.skip(f"the MongoDB that was given is at {host}: no proxy can stand in front of it")
    with Proxy(int(host.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def driver(proxy: Proxy, mongodb_url: str) -> Iterator[MongoDriver]:
    driver = MongoDriver(proxy.through(mongodb_url), timeout=5.0)
    yield driver
    driver.close()


@pytest.fixture
def store(driver: MongoDriver) -> MongoStore:
    return MongoStore(MongoBroker(driver), MongoBackend(driver))


def cut(proxy: Proxy, how: str, word: bytes) -> None:
    """Let the next command of this name meet the fault."""
    name = b"\x02" + word + b"\x00"
    if how == "lost reply":
        proxy.drop_next_reply(matching=name)
    elif how == "stepped down":
        proxy.answer_next(private_mongo.refusal(10107), matching=name)
    else:
        # InterruptedDueToReplStateChange: it was carried out, and the client does not know.
        proxy.answer_next(private_mongo.refusal(11602), matching=name, executed=True)


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("word", WRITES)
def test_submission_is_applied_once_at_any_fault_of_a_reply(
    store: MongoStore, proxy: Proxy, how: str, word: bytes
) -> None:
    submit(store, "warm", token="warm")
    cut(proxy, how, word)
    try:
        submit(store, "a", "b", token="t")
    except MachineryError:
        proxy.heal()
        submit(store, "a", "b", token="t")
    proxy.heal()
    store.finish_intents()

    session = store.open_session(["q"], worker="w")
    assert [one.receipt.uuid for one in session.receive(9, 0)] == ["warm", "a", "b"]
    assert set(store.backend.get_states(["a", "b"])) == {"a", "b"}


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("word", WRITES)
@pytest.mark.parametrize("limit", [1, 5])
def test_no_claim_is_lost_with_its_reply(
    store: MongoStore, proxy: Proxy, how: str, word: bytes, limit: int
) -> None:
    submit(store, "a", "b", "c", token="t")
    session = store.open_session(["q"], worker="w")
    cut(proxy, how, word)
    found: list[str] = []
    for _ in range(6):
        try:
            found += [one.receipt.uuid for one in session.receive(limit, 0)]
        except BrokerUnavailable:
            proxy.heal()

    assert sorted(found) == ["a", "b", "c"]


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("word", WRITES)
def test_settlement_is_applied_once_at_any_fault_of_a_reply(
    store: MongoStore, proxy: Proxy, how: str, word: bytes
) -> None:
    submit(store, "a", token="t")
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(9, 0)
    end = settlement(delivery, callbacks=["c1", "c2"])
    cut(proxy, how, word)
    try:
        assert session.settle([end]) == [SETTLED]
    except MachineryError:
        proxy.heal()
        assert session.settle([end])[0] in (SETTLED, ALREADY)
    proxy.heal()

    assert session.settle([end]) == [ALREADY]
    store.finish_intents()
    assert store.backend.get_state("a").state is State.SUCCESS
    other = store.open_session(["c", "q"], worker="w")
    assert [one.receipt.uuid for one in other.receive(9, 0)] == ["c1", "c2"]


@pytest.mark.parametrize("how", ["lost reply", "stepped down"])
@pytest.mark.parametrize("word", [b"insert", b"update"])
def test_unique_task_is_sent_once_at_any_fault_of_a_reply(
    mongodb_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, how: str, word: bytes
) -> None:
    monkeypatch.setattr(MongoDriver, "intent_age", 0.3)
    server, ran = Server(proxy.through(mongodb_url)), list[int]()
    task = server.task("work", unique=True)(ran.append)
    task.send(1)
    cut(proxy, how, word)

    first = task.send(2)
    second = task.send(2)
    proxy.heal()

    assert (first.duplicate, second.duplicate, second.uuid) == (False, True, first.uuid)
    with server.new_worker(concurrency=1):
        first.get(timeout=HANG)
    assert sorted(ran) == [1, 2]
    server.close()


@pytest.mark.parametrize("beside", [False, True], ids=["one store", "two stores"])
def test_a_claim_shows_its_task_although_its_sender_stands_still(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """After the claim's write: a stateless task taken for a finished one would admit a second."""
    backend = MongoBackend(store.driver)
    slow: Store = (
        TwoStores(MemoryBroker(MemoryRows(ManualClock())), backend, ManualClock())
        if beside
        else MongoStore(MongoBroker(store.driver), backend)
    )
    monkeypatch.setattr(
        backend.schedules,
        "follow",
        lambda intent, again: (_ for _ in ()).throw(BackendUnavailable("stopped")),
    )
    with pytest.raises(BackendUnavailable, match="stopped"):
        claim(slow, "a", None, b"1", "t")
    assert store.backend.get_states(["t"]) == {}

    assert store.backend.claims(["a"]) == [b"1"]
    assert store.backend.get_state("t").state is State.PENDING
    assert not claim(store, "a", None, b"2", "u")
    # Marked as started, and released, while what was begun with it is still open.
    assert store.backend.amend(Rider(name="a", expected=b"1", body=b"started", life=100.0))
    store.backend.release([("a", b"started")])
    assert store.backend.claims(["a"]) == [None]

    store.driver.intent_age = 0.0
    store.tend()
    sent = (
        [key for key, _ in store.backend.unsent(9, older_than=0.0)] if beside else drain(store, "q")
    )
    assert sent == (["unique a t"] if beside else ["t"])
    assert claim(store, "a", None, b"3", "v")


@pytest.mark.parametrize("word", WRITES)
def test_a_lock_is_held_by_one_though_a_reply_was_lost(
    driver: MongoDriver, proxy: Proxy, word: bytes
) -> None:
    lock = MongoLock(driver)
    lock.acquire("warm", ttl=10.0)
    cut(proxy, "lost reply", word)

    held = lock.acquire("n", ttl=10.0)

    assert held is not None
    proxy.heal()
    assert lock.acquire("n", ttl=10.0) is None
    assert lock.release(held) is True


def test_a_callback_that_is_stored_once_more_is_not_run_again(store: MongoStore) -> None:
    """A key is free again once its task was run and deleted; the task's state says that it ran."""
    message = message_of("a")
    submission = Submission(token="t", messages=[message], states=[state_of("a")])
    store.submit(submission)
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(9, 0)
    session.settle([settlement(delivery)])

    store.messages.store([("t", [message])])

    assert session.receive(9, 0) == []
    assert not any(one.waiting or one.running for one in store.broker.stats())


def test_change_cut_off_between_writes_is_finished_by_another(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "a", token="t")
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(9, 0)
    end = settlement(delivery, callbacks=["c"])
    monkeypatch.setattr(
        store, "end", lambda endings, again: (_ for _ in ()).throw(BrokerUnavailable("killed"))
    )
    with pytest.raises(BrokerUnavailable):
        session.settle([end])
    monkeypatch.undo()
    store.driver.intent_age = 0.0

    heir = MongoStore(MongoBroker(store.driver), MongoBackend(store.driver))
    heir.tend()

    assert store.backend.get_state("a").state is State.SUCCESS
    assert [one.receipt.uuid for one in heir.open_session(["c"], worker="w").receive(9, 0)] == ["c"]
    assert session.settle([end]) == [ALREADY]


@pytest.mark.parametrize("by", ["tend", "repeat", "next change"])
def test_effects_of_a_change_are_finished_once_by_another(
    driver: MongoDriver, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The owner died after the first write. Its finisher removes it, or it repeats for ever."""
    backend, heir = MongoBackend(driver), MongoBackend(driver)
    retry = Change(key="t", mark="1", states=(state_of("t", State.RETRY), state_of("c")))
    monkeypatch.setattr(
        backend.changes,
        "follow",
        lambda changes, again: (_ for _ in ()).throw(BackendUnavailable("killed")),
    )
    with pytest.raises(BackendUnavailable):
        backend.apply([retry])
    assert backend.get_states(["c"]) == {}

    if by == "tend":
        driver.intent_age = 0.0
        heir.tend()
    elif by == "repeat":
        assert heir.apply([retry]) == [ALREADY]
    else:
        assert heir.apply(
            [Change(key="t", mark="2", states=(state_of("t", State.SUCCESS, run=1),))]
        ) == [SETTLED]

    assert backend.get_state("c").state is State.PENDING
    assert (
        driver.run(lambda store: store.tasks.find_one({"deed_at": {"$gt": 0}}), doing="looking")
        is None
    )
    backend.purge_state("c")
    driver.intent_age = 0.0
    heir.tend()
    assert backend.get_states(["c"]) == {}


def test_failed_sweep_is_tried_again_a_minute_later(proxy: Proxy, mongodb_url: str) -> None:
    clock = ManualClock()
    driver = MongoDriver(proxy.through(mongodb_url), clock=clock)
    backend = MongoBackend(driver)
    backend.revoke(["a"], life=0.5)
    clock.advance(1.0)

    proxy.answer_next(private_mongo.refusal(50), matching=b"\x02delete\x00")
    with pytest.raises(BackendUnavailable):
        backend.tend()
    clock.advance(30.0)
    backend.tend()
    assert backend.revoked(["a"]) == {"a"}  # nobody has swept: a slow server gets time to recover
    clock.advance(31.0)
    backend.tend()
    assert backend.revoked(["a"]) == set()
    driver.close()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_uncounted_member_does_not_block_its_chord(
    driver: MongoDriver, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """A worker died between a member's arrival and its count.

    `late` other members arrive before somebody finishes the count, the rest after it.
    """
    backend, heir = MongoBackend(driver), MongoBackend(driver)

    def ended(uuid: str) -> Change:
        arrived = Arrival(group_uuid="g", task_uuid=uuid, total=3, ok=True, callback=b"callback")
        return Change(
            key=uuid,
            mark=f"mark {uuid}",
            states=(state_of(uuid, State.SUCCESS),),
            arrivals=(arrived,),
        )

    def die(*_: object, **__: object) -> bool:
        raise BackendUnavailable("killed")

    monkeypatch.setattr(mongo_groups, "_count", die)
    with pytest.raises(BackendUnavailable):
        backend.apply([ended("a")])
    monkeypatch.undo()

    for uuid in "bc"[:late]:
        heir.apply([ended(uuid)])
        assert heir.ready_groups(9) == []
    driver.intent_age = 0.0
    heir.tend()
    for uuid in "bc"[late:]:
        assert heir.ready_groups(9) == []
        heir.apply([ended(uuid)])

    assert [group.group_uuid for group in heir.ready_groups(9)] == ["g"]
    assert heir.apply([ended("a")]) == [ALREADY]
    assert backend.trigger_chord("g") is True


def test_lost_server_fails_in_time_and_is_used_when_it_is_back(
    mongodb_server: str,
) -> None:
    if not mongodb_server.startswith("mongodb://127.0.0.1:"):
        pytest.skip("the MongoDB that was given is not ours to stop")
    kind = private_mongo.KINDS[private_mongo.best_kind()]
    with kind() as server:
        driver = MongoDriver(server.url + "mine", timeout=0.5)
        broker, backend = MongoBroker(driver), MongoBackend(driver)
        broker.put([Message(uuid="a", name="add", queue="q", body=b"a")], token="a")
        server.kill()

        with pytest.raises((BrokerUnavailable, PublishUnknown), match="publishing"):
            broker.put([Message(uuid="b", name="add", queue="q", body=b"b")], token="b")
        with pytest.raises(BackendUnavailable):
            backend.get_states(["a"])

        server.start()
        broker.put([Message(uuid="b", name="add", queue="q", body=b"b")], token="b")
        consumer = broker.consume(["q"], worker="w")
        assert [one.body for one in consumer.receive(9, 0)] == [b"a", b"b"]
        consumer.close()
        driver.close()


@pytest.mark.parametrize("code", [43, 175])
def test_listing_with_a_lost_cursor_is_read_again(
    driver: MongoDriver, proxy: Proxy, code: int
) -> None:
    backend = MongoBackend(driver)
    backend.apply([change(TaskState(task_uuid="t"))])
    proxy.answer_next(private_mongo.refusal(code, "cursor not found"), matching=b"\x02find\x00")

    assert set(backend.get_states(["t"])) == {"t"}
    assert proxy.counts["answered"] == 1


@pytest.mark.parametrize("end", ["reset", "finish"])
def test_connections_that_the_server_has_closed_are_opened_anew(
    store: MongoStore, proxy: Proxy, end: str
) -> None:
    submit(store, "a", token="t")
    session = store.open_session(["q"], worker="w")
    getattr(proxy, end)()

    found: list[str] = []
    for _ in range(3):
        try:
            found += [one.receipt.uuid for one in session.receive(9, 0)]
        except BrokerUnavailable:
            continue  # it was closed while it was asked
    assert found == ["a"]
    getattr(proxy, end)()
    assert session.beat() is True


def test_every_write_waits_for_the_majority(mongodb_url: str) -> None:
    """A returning old primary loses what it alone had: no write of ours may be of that kind."""
    heard: list[Any] = []
    is_over = threading.Event()

    class Hear(pymongo.monitoring.CommandListener):
        def started(self, event: Any) -> None:
            if not is_over.is_set():
                heard.append((event.command_name, event.command.get("writeConcern")))

        def succeeded(self, event: Any) -> None: ...
        def failed(self, event: Any) -> None: ...

    pymongo.monitoring.register(Hear())
    driver = MongoDriver(mongodb_url)
    store = MongoStore(MongoBroker(driver), MongoBackend(driver))
    submit(store, "a", "b", token="t")
    session = store.open_session(["q"], worker="w")
    one, two = session.receive(9, 0)
    session.settle(
        [settlement(one, callbacks=["c"], arrivals=[arrival(one, 1)])],
        [Mark(delivery=two, state=state_of("b"))],
    )
    assert store.fire(Firing(group_uuid="g"))
    session.beat()
    store.tend()
    session.close()
    lock = MongoLock(driver)
    held = lock.acquire("n", ttl=10.0)
    assert held is not None
    lock.release(held)
    driver.close()
    is_over.set()

    writes = [
        (name, concern)
        for name, concern in heard
        if name in ("insert", "update", "delete", "findAndModify")
    ]
    assert {name for name, _ in writes} == {"insert", "update", "delete", "findAndModify"}
    assert [
        (name, concern) for name, concern in writes if (concern or {}).get("w") != "majority"
    ] == []


def test_unstorable_state_is_refused_and_blocks_nothing(store: MongoStore) -> None:
    """MongoDB's documents have 16 MB at most; the client library knows it."""
    huge = b"x" * (17 << 20)
    with pytest.raises(PublishRefused, match="16 MB"):
        store.submit(
            Submission(token="t", messages=[Message(uuid="a", name="add", queue="q", body=huge)])
        )
    with pytest.raises(PublishRefused, match="16 MB"):
        store.broker.put([Message(uuid="a", name="add", queue="q", body=huge)], token="")

    assert store.broker.pending("q", 9) == []


def sorted_out(error: Exception) -> tuple[type[MachineryError], bool, bool]:
    """Return the error that a settlement raises for this one, and two facts.

    Whether the settlement may have been carried out, and whether it is repeated.
    """
    ours = mongo_errors.as_ours(
        error, url="mongodb://h", doing="settling", away=BrokerUnavailable, refused=MachineryError
    )
    return type(ours), mongo_errors.is_unknown(error), mongo_errors.may_be_repeated(error)


def test_server_errors_are_sorted_by_what_can_be_done() -> None:
    def in_bulk(code: int) -> BulkWriteError:
        return BulkWriteError(
            {"writeErrors": [{"code": code, "errmsg": "no"}], "writeConcernErrors": []}
        )

    # Only the first kind makes the worker wait and try again; the second goes to the dead letters.
    assert sorted_out(in_bulk(17419)) == (MachineryError, True, False)
    assert sorted_out(OperationFailure("too large", 10334))[0] is MachineryError
    assert sorted_out(OperationFailure("disk", 14031)) == (PublishRefused, False, False)
    assert sorted_out(OperationFailure("who are you", 18)) == (StoreUnusable, False, False)
    assert sorted_out(OperationFailure("no rights", 13))[0] is StoreUnusable
    assert sorted_out(NotPrimaryError("not primary", {"code": 10107})) == (
        BrokerUnavailable,
        False,
        True,
    )
    assert sorted_out(NotPrimaryError("going down", {"code": 11602})) == (
        BrokerUnavailable,
        True,
        True,
    )
    assert sorted_out(AutoReconnect("reset")) == (BrokerUnavailable, True, True)
    assert sorted_out(NetworkTimeout("slow")) == (BrokerUnavailable, True, True)
    assert sorted_out(ServerSelectionTimeoutError("nobody")) == (BrokerUnavailable, False, False)
    assert sorted_out(ConfigurationError("nonsense")) == (StoreUnusable, False, False)


def test_wrong_url_is_refused_at_reading() -> None:
    for url, text in (
        ("mongodb://", "no host"),
        ("mongodb://h:x/db", "port"),
        ("mongodb://h:/db", "port"),
        ("mongodb://h/a b", "database"),
        ("mongodb+srv://h:1/db", "name server"),
        ("mongodb://h/db?w=0", "w=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            Config(broker=url)


def test_no_error_holds_the_password() -> None:
    driver = MongoDriver("mongodb://user:hunter2@127.0.0.1:1/db", timeout=0.1)
    with pytest.raises(BackendUnavailable) as caught:
        driver.run(lambda store: store.tasks.find_one(), doing="trying")
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)


# Go's documents


def test_gos_states_are_read_and_written_over(driver: MongoDriver) -> None:
    backend = MongoBackend(driver)
    created_at = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
    driver.run(
        lambda store: store.tasks.insert_one(
            {"_id": "task_go", "state": "PENDING", "task_name": "add", "created_at": created_at}
        ),
        doing="being Go",
    )
    state = backend.get_state("task_go")
    assert (state.state, state.task_name, state.created_at) == (State.PENDING, "add", created_at)

    backend.set_state_started(signature())
    assert backend.get_state("task_go").state is State.STARTED
    done = {"state": "SUCCESS", "results": [{"type": "int64", "value": Int64(7)}]}
    driver.run(
        lambda store: store.tasks.update_one({"_id": "task_go"}, {"$set": done}), doing="being Go"
    )

    state = backend.get_state("task_go")
    assert (state.state, list(state.results)) == (State.SUCCESS, [Arg(type="int64", value=7)])
    backend.set_state_failure(signature(), "too late")
    assert backend.get_state("task_go").state is State.SUCCESS


def test_ours_are_as_go_reads_them(driver: MongoDriver) -> None:
    backend = MongoBackend(driver)
    results = (
        Arg(type="int64", value=5),
        Arg(type="[]int64", value=[1]),
        Arg(type="string", value='{"a": 1}'),
    )
    backend.apply(
        [change(TaskState(task_uuid="t", task_name="add", state=State.SUCCESS, results=results))]
    )
    backend.init_group("g", ["b", "a"])

    task: dict[str, Any] = (
        driver.run(lambda store: store.tasks.find_one({"_id": "t"}), doing="being Go") or {}
    )
    group: dict[str, Any] = (
        driver.run(lambda store: store.group_metas.find_one({"_id": "g"}), doing="being Go") or {}
    )
    assert (task["state"], task["task_name"], task["error"]) == ("SUCCESS", "add", "")
    assert [(one["type"], one["value"]) for one in task["results"]] == [
        ("int64", 5),
        ("[]int64", [1]),
        ("string", '{"a": 1}'),
    ]
    assert isinstance(task["created_at"], dt.datetime)
    assert (group["task_uuids"], group["chord_triggered"], group["lock"]) == (
        ["b", "a"],
        False,
        False,
    )


def test_every_integer_goes_in_64_bits() -> None:
    assert [type(one) for one in (go_value(5), go_value([1])[0], go_value({"a": 1})["a"])] == [
        Int64
    ] * 3
    assert (go_value(True), go_value(2**63), go_value(None)) == (True, str(2**63), None)


def test_client_library_is_imported_only_for_its_url() -> None:
    program = (
        "import sys, machinery_py; machinery_py.Server('memory://'); "
        "print('pymongo' in sys.modules, 'bson' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


def test_an_idle_worker_asks_seldom(mongodb_url: str) -> None:
    """At most two claims a second once it has rested, and few rounds of house-keeping.

    Rounds are counted apart: each is some twenty commands, and a wait of five seconds may see
    the end of one interval and the start of the next.
    """
    asked: collections.Counter[str] = collections.Counter()
    database = mongodb_url.rpartition("/")[2]

    class Count(pymongo.monitoring.CommandListener):
        def started(self, event: Any) -> None:
            if event.database_name == database:
                asked[event.command_name] += 1

        def succeeded(self, event: Any) -> None: ...
        def failed(self, event: Any) -> None: ...

    pymongo.monitoring.register(Count())
    server = Server(mongodb_url)
    with server.new_worker(concurrency=1):
        # time passes for real: what is measured is how often a process asks in it
        idle = threading.Event()
        idle.wait(5.0)
        before = asked.copy()
        started = time.monotonic()
        idle.wait(5.0)
        lasted = time.monotonic() - started
        later = asked - before
    server.close()
    assert 1 <= later["findAndModify"] <= 2 * lasted + 3
    rounds = lasted / 5 + 1
    assert later["aggregate"] <= rounds
    assert sum(later.values()) - later["findAndModify"] <= 25 * rounds + 3 * lasted


def signature() -> Signature[object]:
    return Signature(name="add", uuid="task_go")


def change(state: TaskState) -> Change:
    return Change(key=state.task_uuid, states=(state,))
