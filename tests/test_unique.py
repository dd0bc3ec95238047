"""Decisions on unique and exclusive tasks from values and time alone, on the memory stores."""

from __future__ import annotations

import datetime as dt
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from machinery_py import (
    ArgumentError,
    Config,
    DuplicateTask,
    PublishRefused,
    Server,
    State,
    TaskFailed,
    Unsupported,
)
from machinery_py.backends.base import CONFLICT, SETTLED, Change, Verdict
from machinery_py.registry.calls import Call
from machinery_py.registry.unique_keys import MARGIN, KeyClaim, lock_name, owner, unique_key
from machinery_py.stores.open import Stores
from machinery_py.stores.outbox import TwoStores
from machinery_py.tasks.signature import HEADER_UNIQUE, Arg
from machinery_py.tasks.states import TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from machinery_py.testing.harness import Harness
from machinery_py.testing.waiting import wait_until

NOW = dt.datetime(2026, 11, 20, tzinfo=dt.timezone.utc)


def state(word: State) -> TaskState:
    return TaskState(task_uuid="t", state=word)


# Keys


def test_the_bytes_of_a_key_are_those_of_the_page() -> None:
    def rebuild(shop: int, reason: str = "cron", *, deep: bool = False) -> None: ...

    call = Call("rebuild", rebuild)
    told = b'["rebuild",[["int64",7],["string","cron"]],{"deep":["bool",false]}]'
    for args in (
        call.arguments((7,), {}),
        call.arguments((), {"shop": 7}),
        call.arguments((7, "cron"), {"deep": False}),
    ):
        assert unique_key("rebuild", call, args, True) == hashlib.sha256(told).hexdigest()
    own = hashlib.sha256(b'["rebuild","shop-7"]').hexdigest()
    assert unique_key("rebuild", call, call.arguments((7,), {}), "shop-7") == own
    assert (
        unique_key(
            "rebuild",
            call,
            call.arguments((7,), {}),
            lambda shop, reason="", deep=False: f"shop-{shop}",
        )
        == own
    )


def test_arguments_that_look_alike_are_not_the_same() -> None:
    def anything(*args: Any, **named: Any) -> None: ...

    call = Call("f", anything)
    ways = [
        ((), {}),
        ((1,), {}),
        (("1",), {}),
        ((1.0,), {}),
        ((True,), {}),
        ((None,), {}),
        (("a", "b"), {}),
        (("ab",), {}),
        (("a,b",), {}),
        ((["a", "b"],), {}),
        (({"a": 1},), {}),
        ((), {"a": 1}),
        ((), {"b": 1}),
        ((1,), {"a": 1}),
    ]
    assert len(
        {unique_key("f", call, call.arguments(args, named), True) for args, named in ways}
    ) == len(ways)
    nested = [{"a": {"x": 1, "y": [1, 2]}, "b": 2}, {"b": 2, "a": {"y": [1, 2], "x": 1}}]
    assert len({unique_key("f", call, call.arguments((one,), {}), True) for one in nested}) == 1


def test_a_default_that_cannot_be_sent_is_left_out() -> None:
    def work(number: int, how: object = object(), *, more: int = 1) -> None: ...

    call = Call("work", work)
    keys = {
        unique_key("work", call, call.arguments(*ways), True)
        for ways in (((1,), {}), ((), {"number": 1}))
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    "how", ["", 5, lambda number: number, lambda: "x", lambda number: {}[number]]
)
def test_a_key_that_is_no_text_is_refused(how: Any) -> None:
    call = Call("work", lambda number: None)
    with pytest.raises(ArgumentError, match="work: "):
        unique_key("work", call, (Arg(type="int64", value=1),), how)


def test_the_name_of_a_lock_is_the_callers_own() -> None:
    call = Call("work", lambda number: None)
    args = (Arg(type="int64", value=7),)
    assert lock_name("work", call, args, "feed") == "feed"
    assert lock_name("work", call, args, lambda number: f"feed-{number}") == "feed-7"
    assert lock_name("work", call, args, "").startswith("machinery:exclusive:work:")


def test_a_key_that_names_a_parameter_means_its_value() -> None:
    def work(doc: str, how: int = 3, *, deep: bool = False) -> None: ...

    call = Call("work", work)
    one, same, other = (call.arguments(args, {}) for args in (("a",), ("a", 3), ("b",)))
    assert lock_name("work", call, one, "doc") == "doc=a"
    assert lock_name("work", call, one, "how") == lock_name("work", call, same, "how") == "how=3"
    assert lock_name("work", call, one, "deep") == "deep=false"
    assert unique_key("work", call, one, "doc") != unique_key("work", call, other, "doc")
    assert lock_name("work", call, one, "docs") == "docs"  # names no parameter


def test_keys_and_locks_of_two_applications_are_not_the_same() -> None:
    call = Call("work", lambda number: None)
    args = (Arg(type="int64", value=7),)
    for how in (True, "feed"):
        assert unique_key("work", call, args, how, owner="shop") != unique_key(
            "work", call, args, how
        )
    assert lock_name("work", call, args, "", owner="shop") != lock_name("work", call, args, "")
    assert lock_name("work", call, args, "feed", owner="shop") == "feed"

    # Not a store's address, which processes may spell differently; and the default is unchanged.
    assert (
        owner(Config(broker="redis://a", lock="redis://l"))
        == owner(Config(broker="redis://b", lock="redis://l"))
        == ""
    )
    assert owner(Config(default_queue="shop")) == owner(Config(application="shop")) == "shop"
    assert owner(Config(default_queue="shop", application="machinery_tasks")) == ""


# Claims


@pytest.mark.parametrize("word", State)
def test_a_claim_stands_while_its_task_is_not_over(word: State) -> None:
    assert KeyClaim(uuid="t").stands(state(word), NOW) is not word.is_finished
    assert not KeyClaim(uuid="t").stands(None, NOW)


def test_a_claim_stands_in_its_window() -> None:
    claim = KeyClaim(uuid="t", until=NOW.timestamp())
    assert claim.stands(state(State.STARTED), NOW - dt.timedelta(seconds=1))
    assert not claim.stands(state(State.STARTED), NOW)


def test_expired_call_frees_its_unique_key() -> None:
    claim, long_after = (
        KeyClaim(uuid="t", expires=NOW.timestamp()),
        NOW + dt.timedelta(seconds=MARGIN),
    )
    assert claim.stands(state(State.PENDING), NOW)
    assert not claim.stands(state(State.PENDING), long_after)
    assert claim.stands(state(State.STARTED), long_after)


# Options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unique_until": "end"}, "unique_until='end'"),
        ({"on_duplicate": "drop"}, "on_duplicate='drop'"),
        ({"exclusive": "maybe"}, "exclusive='maybe'"),
        ({"unique_for": 0}, "unique_for=0"),
        ({"exclusive": "wait", "exclusive_timeout": -1}, "exclusive_timeout=-1"),
        ({"exclusive_key": "k"}, "exclusive_key='k' .it needs exclusive=…"),
        ({"exclusive_timeout": 5}, 'exclusive_timeout=5 .it needs exclusive="wait"'),
        ({"exclusive": "skip", "exclusive_timeout": 5}, "exclusive_timeout=5 and exclusive='skip'"),
        ({"exclusive": "wait", "exclusive_key": 5}, "exclusive_key=5"),
        ({"debounce": 0}, "debounce=0"),
        ({"debounce": 5, "unique_until": "finish"}, "debounce=5 and unique_until"),
        ({"unique_key": "k"}, "unique_key='k'.*it needs unique=True or debounce"),
        ({"unique": "a", "unique_key": "b"}, "unique_key='b'"),
    ],
)
def test_a_wrong_option_is_refused_where_the_task_is_made(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Server("memory://").task("work", **options)(print)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exclusive": "maybe"}, "exclusive='maybe'.*'wait' or 'skip'"),
        ({"exclusive": None}, "exclusive=None.*'wait' or 'skip'"),
        ({"exclusive": False}, "exclusive=False.*'wait' or 'skip'"),
        ({"exclusive_key": "k"}, "exclusive_key='k' .it needs exclusive=…"),
        ({"exclusive_timeout": 5}, 'exclusive_timeout=5 .it needs exclusive="wait"'),
        ({"exclusive": "skip", "exclusive_timeout": 5}, "exclusive_timeout=5 and exclusive='skip'"),
        ({"exclusive": "skip", "exclusive_key": str}, "a function belongs to the task"),
        ({"exclusive": "wait", "exclusive_key": "k" * 256}, "has 256 bytes"),
    ],
)
def test_wrong_exclusive_option_of_a_call_is_refused(options: Any, text: str) -> None:
    work = Server("memory://").task("work")(print)
    with pytest.raises(ValueError, match=text):
        work.options(**options)


def test_call_of_an_exclusive_task_may_change_one_option() -> None:
    work = Server("memory://").task(exclusive="wait", exclusive_key="k")(print)
    patient = work.options(exclusive_timeout=dt.timedelta(minutes=1))

    assert patient.signature().headers == {"machinery_exclusive_timeout": "60.0"}
    with pytest.raises(ValueError, match="exclusive_timeout=.* and exclusive='skip'"):
        patient.options(exclusive="skip")


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'uniqe'.*did you mean 'unique'"):
        Server("memory://").task("work", uniqe=True)(print)  # type: ignore[call-overload]
    task = Server("memory://").task(print)
    with pytest.raises(ValueError, match="on_duplicate='drop'"):
        task.options(on_duplicate="drop").send()  # type: ignore[typeddict-item]


def test_the_error_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(DuplicateTask("work", "task_1", "PENDING")))
    assert (str(error), error.uuid) == (str(DuplicateTask("work", "task_1", "PENDING")), "task_1")


# Sending, with a clock of our own


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Flaky:
    """A Server over two stores that fail on command."""

    def __init__(self, clock: ManualClock) -> None:
        self.server = Server(
            Config(broker="memory://", result_backend="memory://other", publish_timeout=1.0),
            clock=clock,
        )
        stores = Stores(self.server.config, clock)
        self.broker, self.backend = (
            FlakyBroker(stores.store.broker),
            FlakyBackend(stores.store.backend),
        )
        self.server.app.swap(
            self.server.config, clock, _With(stores, TwoStores(self.broker, self.backend, clock))
        )
        self.ran: list[int] = []
        self.task = self.server.task("work", unique=True)(self._work)

    def _work(self, number: int) -> int:
        self.ran.append(number)
        return number


class _With(Stores):
    def __init__(self, stores: Stores, store: TwoStores) -> None:
        self.__dict__.update(stores.__dict__)
        self._own = store

    @property
    def store(self) -> TwoStores:  # type: ignore[override]  # the same, with faults
        return self._own


@pytest.fixture
def flaky(clock: ManualClock) -> Iterator[Flaky]:
    flaky = Flaky(clock)
    yield flaky
    flaky.server.close()


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ("claims", False),
        ("apply", False),
        ("apply", True),
        ("put", False),
        ("put", True),
        ("clear_outbox", False),
        ("clear_outbox", True),
    ],
)
def test_a_fault_in_between_is_repeated_and_sends_once(
    flaky: Flaky, call: str, lost: bool, clock: ManualClock
) -> None:
    (flaky.broker if call == "put" else flaky.backend).faults.next_call(call, lose_reply=lost)

    first = flaky.task.send(1)
    second = flaky.task.send(1)

    assert (first.duplicate, second.duplicate, second.uuid) == (False, True, first.uuid)
    clock.advance(6.0)
    flaky.server.app.store.tend()
    with flaky.server.new_worker(concurrency=1):
        assert first.get(timeout=30.0) == 1
    assert flaky.ran == [1]


def test_while_the_backend_is_away_nothing_is_sent(flaky: Flaky) -> None:
    for _ in range(100):
        flaky.backend.faults.next_call("claims")
    with pytest.raises(PublishRefused, match="its key could not be looked at"):
        flaky.task.send(1)
    flaky.backend.faults.heal()
    assert not flaky.task.send(1).duplicate


def test_message_is_sent_later_when_the_broker_stays_away(flaky: Flaky, clock: ManualClock) -> None:
    for _ in range(100):
        flaky.broker.faults.next_call("put")
    first = flaky.task.send(1)  # accepted: key, state and message are in the backend

    assert flaky.task.send(1).uuid == first.uuid
    flaky.broker.faults.heal()
    clock.advance(6.0)
    with flaky.server.new_worker(concurrency=1):
        assert first.get(timeout=30.0) == 1


def test_lost_reply_of_an_ended_task_sends_no_second_call(flaky: Flaky) -> None:
    backend, apply = flaky.backend, flaky.backend.inner.apply

    def slow(changes: Sequence[Change]) -> list[Verdict]:
        assert apply(changes) == [SETTLED]
        backend.inner.apply = apply  # type: ignore[method-assign]
        [change] = changes
        flaky.server.app.store.publish_left(change.key)
        with flaky.server.new_worker(concurrency=1) as worker:
            wait_until(
                lambda: worker.processed and backend.inner.claims([change.riders[0].name]) == [None]
            )
        return [CONFLICT]

    backend.inner.apply = slow  # type: ignore[method-assign]
    result = flaky.task.send(1)

    assert (result.duplicate, result.get(timeout=30.0)) == (False, 1)
    with flaky.server.new_worker(concurrency=1, burst=True):
        pass
    assert flaky.ran == [1]


def test_a_backend_without_claims_refuses_in_words() -> None:
    server = Server(Config(broker="memory://", result_backend="null"))
    task = server.task("work", unique=True)(lambda: None)
    with pytest.raises(Unsupported, match="work is unique, and the null backend keeps no keys"):
        task.send()
    task.options(unique=False).send()
    server.close()


# The harness, and eager


def test_the_harness_joins_and_lets_windows_pass() -> None:
    server, ran = Server("memory://"), []

    @server.task(unique=True, unique_for=60)
    def work(number: int) -> None:
        ran.append(number)

    with Harness(server) as harness:
        first = work.options(delay=3600).send(1)
        assert work.send(1).uuid == first.uuid
        harness.advance(seconds=61)
        assert not work.send(1).duplicate
        harness.drain()
        assert ran == [1]
        harness.advance(hours=1)
        harness.drain()
        assert ran == [1, 1]


def test_the_harness_runs_exclusive_tasks_one_after_the_other() -> None:
    server, ran = Server("memory://"), []

    @server.task(exclusive="wait", exclusive_key="k")
    def work(number: int) -> None:
        ran.append(number)

    with Harness(server) as harness:
        for number in range(20):
            work.send(number)
        harness.drain()
        assert ran == list(range(20))

        with server.lock("k"):
            waits = work.send(99)
            harness.drain()
            assert not waits.is_finished()
        harness.advance(seconds=5)
        harness.drain()
        assert ran[-1] == 99


def test_debounced_task_runs_once_after_the_last_send() -> None:
    server, ran = Server("memory://"), list[tuple[str, int]]()

    @server.task(debounce=5, unique_key="doc")
    def index(doc: str, version: int) -> None:
        ran.append((doc, version))
        if version == 3:
            assert not index.send(doc, 4).duplicate  # the key is free since the run has begun

    with Harness(server) as harness:
        for version in (1, 2, 3):
            index.send("a", version)
            harness.advance(seconds=4)  # each counts the delay anew
            harness.drain()
        index.send("b", 1)
        assert ran == []
        harness.advance(seconds=1)
        harness.drain()
        assert ran == [("a", 3)]
        harness.advance(seconds=5)
        harness.drain()
        assert sorted(ran[1:]) == [("a", 4), ("b", 1)]

        index.options(delay=60).send("c", 1)  # this call's own delay
        index.options(unique=False).send("d", 1)  # not debounced
        harness.drain()
        assert ran[3:] == [("d", 1)]


def test_eager_runs_a_unique_task_at_once() -> None:
    server = Server("eager")
    inner: list[bool] = []

    @server.task(unique=True, exclusive="skip")
    def work(number: int) -> int:
        if not inner:
            inner.append(work.send(number).duplicate)
        return number

    first, second = work.send(1), work.send(1)
    assert (first.get(timeout=1.0), second.get(timeout=1.0)) == (1, 1)
    assert (first.uuid != second.uuid, inner) == (True, [True])

    with (
        server.lock(lock_name("work", work.call, work.signature(2).args, "")),
        pytest.raises(TaskFailed, match="skipped"),
    ):
        work.send(2).get(timeout=1.0)
    server.close()


def test_eager_does_not_wait_for_its_callers_own_lock() -> None:
    server = Server("eager")
    work = server.task("work", exclusive="wait", exclusive_key="k")(lambda: None)
    with server.lock("k"):
        assert work.send().touch() is None
    server.close()


def test_a_task_without_either_pays_nothing() -> None:
    server = Server("memory://")
    asked: list[str] = []
    backend: Any = server.backend
    for name in ("claims", "amend", "release", "get_states"):
        setattr(backend, name, lambda *_, name=name: asked.append(name))
    task = server.task("work")(lambda number: number)
    assert HEADER_UNIQUE not in task.signature(1).headers
    task.send(1)
    with server.new_worker(concurrency=1, burst=True, scheduler=False) as worker:
        wait_until(lambda: worker.processed)
    assert asked == []
    server.close()
