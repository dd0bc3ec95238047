"""A lasting refusal by a store fails one task; a full store makes only its own writes wait."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from machinery_py import Config, Server, Signature, TaskFailed, chain, group
from machinery_py.backends.base import Change, Verdict
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.base import Broker, Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.clock import Clock, SystemClock
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import (
    BackendUnavailable,
    NameRefused,
    PublishRefused,
    PublishUnknown,
    for_good,
)
from machinery_py.results.async_results import AsyncResult
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import MessageStep
from machinery_py.schedules.scheduler import Scheduler
from machinery_py.stores.base import Store
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.rows import RowsStore
from machinery_py.tasks.states import State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run, run_here

WORDS = "no such queue here"


class Choosy(Broker):
    """Gives no queue `forbidden`, and takes no body of more than 10,000 bytes."""

    allowed = False

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        if not self.allowed:
            for one in messages:
                self.check(one)
        return super().put(messages, token=token)  # type: ignore[safe-super]  # of the store beside it

    def check(self, message: Message) -> None:
        if message.queue == "forbidden" or len(message.body) > 10_000:
            raise for_good(PublishRefused(WORDS))

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        if queue == "forbidden" or len(message.body) > 10_000:
            raise for_good(PublishRefused(WORDS))
        super().bury(message, queue=queue, reason=reason, error=error)


class ChoosyMemory(Choosy, MemoryBroker):
    """In memory."""


class Narrow(ChoosyMemory):
    """Has room for five messages in each queue."""

    allowed = True

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        left: list[int] = []
        assert isinstance(self.rows, MemoryRows)
        with self.rows.lock:
            for place, message in enumerate(messages):
                if len(self.pending(message.queue, 5)) < 5:
                    super().put([message], token="")
                else:
                    left.append(place)
        if left:
            error = PublishUnknown("full") if len(left) < len(messages) else PublishRefused("full")
            error.left = frozenset(left)
            raise error
        return True


class ChoosySQLite(Choosy, SQLiteBroker):
    """In a file."""

    def plan_put(self, messages: Iterable[Message], step: MessageStep, **more: Any) -> None:
        messages = list(messages)
        if not self.allowed:
            for one in messages:
                self.check(one)
        super().plan_put(messages, step, **more)


class Shop:
    """An application over a choosy broker."""

    def __init__(self, broker: Choosy, store: Store) -> None:
        self.server = Server(Config(broker="memory://", result_backend="memory://"))
        self.broker = broker
        self.server.app.stores.store = store
        store.refusal = self.server.app.refusal
        self.told: list[str] = []
        self.ran: Counter[str] = Counter()
        self.say = self.server.register_task("say", self._say)
        self.grow = self.server.register_task("grow", lambda size: "x" * size)
        self.join = self.server.register_task("join", lambda *words: "".join(words))
        self.tell = self.server.register_task("tell", self._tell)
        self.shaky = self.server.register_task("shaky", self._shaky)

    def _say(self, word: str, *_: str) -> str:
        self.ran[word] += 1
        return word

    def _tell(self, error: str) -> None:
        self.told.append(error)

    def _shaky(self) -> None:
        raise ValueError("not yet")

    def dead(self) -> list[tuple[str, str]]:
        return [(letter.uuid, letter.reason) for letter in self.server.inspect.dead()]


def two_stores(folder: pathlib.Path, clock: Clock) -> tuple[Choosy, Store]:
    broker = ChoosyMemory(MemoryRows(clock))
    return broker, TwoStores(broker, MemoryBackend(MemoryRows(clock)), clock)


def one_store(folder: pathlib.Path, clock: Clock) -> tuple[Choosy, Store]:
    driver = SQLiteDriver(str(folder / "machinery.db"), clock=clock)
    broker = ChoosySQLite(driver)
    return broker, RowsStore(broker, SQLiteBackend(driver))


@pytest.fixture(params=[one_store, two_stores])
def shop(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Shop]:
    shop = Shop(*request.param(tmp_path, SystemClock()))
    yield shop
    shop.server.close()


def failed(result: AsyncResult[Any]) -> str:
    with pytest.raises(TaskFailed) as caught:
        result.get(timeout=HANG)
    return caught.value.error


def test_refused_step_of_a_chain_fails_and_blocks_nothing(shop: Shop) -> None:
    flow = shop.say.signature("a") | shop.say.options(queue="forbidden").partial().catch(
        shop.tell.partial()
    )
    bad, good = flow.send(), [shop.say.send(str(number)) for number in range(20)]
    with shop.server.new_worker("w", 4) as worker:
        assert [result.get(timeout=HANG) for result in good] == [
            str(number) for number in range(20)
        ]
        assert WORDS in failed(bad)
        wait_until(lambda: bool(shop.told))
        assert worker.ready
    assert len(shop.told) == 1
    assert bad.steps[0].get_state().state is State.SUCCESS
    assert shop.dead() == [(bad.uuid, "refused")]


def test_refused_message_can_be_replayed_later(shop: Shop) -> None:
    bad = (shop.say.signature("a") | shop.say.options(queue="forbidden").partial()).send()
    with shop.server.new_worker("w", 4, queues=["machinery_tasks", "forbidden"]):
        failed(bad)
        wait_until(lambda: bool(shop.dead()))
        shop.broker.allowed = True
        [letter] = shop.server.inspect.dead()
        assert shop.server.inspect.replay_dead([letter.id]) == [bad.uuid]
        assert shop.server.result(bad.uuid).get(timeout=HANG) == "a"
    assert shop.dead() == []


def test_replay_keeps_only_dead_letters_that_are_refused_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [
        chain(shop.say.signature("a"), shop.say.options(queue="forbidden").signature(word)).send()
        for word in ("b", "c")
    ]
    with shop.server.new_worker("w", 4):
        for one in bad:
            failed(one)
        wait_until(lambda: len(shop.dead()) == 2)

    def check(message: Message) -> None:
        if message.uuid == bad[0].uuid:
            raise for_good(PublishRefused(WORDS))

    monkeypatch.setattr(shop.broker, "check", check)
    letters = [letter.id for letter in shop.server.inspect.dead()]
    assert shop.server.inspect.replay_dead(letters) == [bad[1].uuid]
    assert shop.dead() == [(bad[0].uuid, "refused")]
    with pytest.raises(PublishRefused, match=WORDS):
        shop.server.inspect.replay_dead([letter.id for letter in shop.server.inspect.dead()])


def test_step_too_large_for_a_dead_letter_stays_in_its_state(shop: Shop) -> None:
    bad = (shop.grow.signature(20_000) | shop.say.partial()).send()
    with shop.server.new_worker("w", 4):
        failed(bad)
        wait_until(lambda: bool(shop.dead()))
        [letter] = shop.server.inspect.dead()
        assert f"machinery retry {bad.uuid}" in letter.error
        shop.broker.allowed = True
        assert shop.server.inspect.retry([bad.uuid]) == [bad.uuid]
        assert len(shop.server.result(bad.uuid).get(timeout=HANG)) == 20_000


def test_a_retry_that_is_refused_is_a_failure(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(message: Message) -> None:
        if message.name == "shaky" and message.eta is not None:
            raise for_good(PublishRefused(WORDS))

    monkeypatch.setattr(shop.broker, "check", check)
    bad = shop.shaky.options(retries=3).signature().catch(shop.tell.partial()).send()
    with shop.server.new_worker("w", 4):
        assert WORDS in failed(bad)
        wait_until(lambda: len(shop.told) == 1 and shop.dead() == [(bad.uuid, "refused")])


def test_chords_behind_and_before_a_refusal_end(shop: Shop) -> None:
    refused = shop.say.options(queue="forbidden")
    behind = (
        group(shop.say.signature("a") | refused.partial(), shop.say.signature("b"))
        | shop.join.partial()
    ).send()
    before = (
        group(shop.say.signature("a"), shop.say.signature("b"))
        | refused.partial().catch(shop.tell.partial())
    ).send()
    with shop.server.new_worker("w", 4):
        assert "cannot be sent" in failed(behind)
        assert WORDS in failed(before)
        wait_until(lambda: len(shop.told) == 1)
    assert sorted(reason for _, reason in shop.dead()) == ["refused", "refused"]


def test_chord_whose_callback_has_no_state_blocks_no_other_chord(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = shop.server.backend
    # Over rows a change is planned, and committed with what belongs to it.
    method = "plan" if isinstance(shop.server.app.stores.store, RowsStore) else "apply"
    change_all = getattr(backend, method)

    def choosy(what: Change | Sequence[Change], *more: Any) -> object:
        changes = [what] if isinstance(what, Change) else what
        if any(state.task_uuid == "chord_a" for change in changes for state in change.states):
            raise NameRefused("another program's", "chord_a")
        return change_all(what, *more)

    members = [shop.say.signature("a"), shop.say.signature("b")]
    (group(members) | shop.join.options(uuid="chord_a").partial()).send()
    monkeypatch.setattr(backend, method, choosy)
    with shop.server.new_worker("w", 4) as worker:
        assert (group(members) | shop.join.options(uuid="chord_b").partial()).send().get(
            timeout=HANG
        ) == "ab"
        wait_until(lambda: not backend.ready_groups(1))
        assert worker.ready
    assert "ends without its callback: another program's" in caplog.text


def test_failure_too_large_with_its_message_is_stored_without_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(*two_stores(tmp_path, SystemClock()))
    apply = shop.server.backend.apply

    def choosy(changes: Sequence[Change]) -> list[Verdict]:
        if any(
            state.message
            for change in changes
            for state in change.states
            if state.state is State.FAILURE
        ):
            raise for_good(BackendUnavailable("too large"))
        return apply(changes)

    monkeypatch.setattr(shop.server.backend, "apply", choosy)
    bad = (shop.say.signature("a") | shop.say.options(queue="forbidden").partial()).send()
    with shop.server.new_worker("w", 4):
        assert WORDS in failed(bad)
    assert shop.server.backend.get_state(bad.uuid).message == b""
    shop.server.close()


def test_dead_letter_is_written_once_when_the_backend_is_away(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(*two_stores(tmp_path, SystemClock()))
    apply, away = shop.server.backend.apply, [True, True]

    def choosy(changes: Sequence[Change]) -> list[Verdict]:
        if away and any(change.mark.startswith("refused") for change in changes):
            away.pop()
            raise BackendUnavailable("away")
        return apply(changes)

    monkeypatch.setattr(shop.server.backend, "apply", choosy)
    bad = (shop.say.signature("a") | shop.say.options(queue="forbidden").partial()).send()
    with shop.server.new_worker("w", 4):
        assert WORDS in failed(bad)
    assert (away, shop.dead()) == ([], [(bad.uuid, "refused")])
    shop.server.close()


@pytest.mark.parametrize("make", [one_store, two_stores])
def test_refused_schedule_blocks_no_other_schedule(
    make: Callable[[pathlib.Path, Clock], tuple[Choosy, Store]],
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    shop = Shop(*make(tmp_path, clock))
    shop.server.app.clock = clock
    shop.server.register_periodic_task(
        "@every 1m", "bad", shop.say.options(queue="forbidden").signature("bad")
    )
    shop.server.register_periodic_task("@every 1m", "good", shop.say.signature("good"))
    scheduler = Scheduler(shop.server.app, shop.server.declared)
    scheduler.step()
    for _ in range(3):
        clock.advance(60.0)
        scheduler.step()
    assert len(shop.server.broker.get_pending_tasks()) == 3
    said = [
        record.getMessage() for record in caplog.records if "schedule bad" in record.getMessage()
    ]
    assert len(said) == len(set(said)) == 3
    shop.server.close()


def test_a_send_that_is_refused_for_good_says_so_at_once(shop: Shop) -> None:
    with pytest.raises(PublishRefused, match="forbidden") as caught:
        shop.say.options(queue="forbidden").send("a")
    assert caught.value.permanent
    assert shop.server.inspect.tasks() == []


def test_unique_send_refused_for_good_raises_and_keeps_no_key(
    shop: Shop,
) -> None:
    once = shop.server.task("once", unique=True, queue="forbidden")(shop._say)
    with pytest.raises(PublishRefused, match=WORDS) as caught:
        once.send("a")
    assert caught.value.permanent

    shop.broker.allowed = True
    assert not once.send("a").duplicate


def test_unknown_send_that_is_refused_for_good_is_not_retried(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def check(message: Message) -> None:
        tries.append(message.uuid)
        raise for_good(PublishUnknown(WORDS))

    monkeypatch.setattr(shop.broker, "check", check)
    with pytest.raises(PublishUnknown, match=WORDS):
        shop.say.send("a")
    assert len(tries) == 1


# A full queue


def tree(shop: Shop, name: str, depth: int) -> Signature[Any]:
    """A task that sends three, each of which sends three, ..."""
    signature = shop.say.signature(name)
    for number in range(3 if depth else 0):
        signature = signature.then(tree(shop, f"{name}{number}", depth - 1))
    return signature


@pytest.mark.parametrize("kept", [True, False], ids=["outboxes", "no outboxes"])
def test_task_that_fills_its_own_queue_ends_and_runs_once(kept: bool) -> None:
    clock = SystemClock()
    broker = Narrow(MemoryRows(clock))
    shop = Shop(
        broker,
        TwoStores(broker, MemoryBackend(MemoryRows(clock)) if kept else NullBackend(clock), clock),
    )
    for number in range(4):
        shop.server.send(tree(shop, f"{number}:", 3))
    with shop.server.new_worker("v", 2) as first, shop.server.new_worker("w", 2):
        wait_until(lambda: len(shop.ran) == 4 * 40)
        wait_until(lambda: not any(line.waiting or line.running for line in broker.stats()))
        assert first.ready
    assert set(shop.ran.values()) == {1}
    shop.server.close()


def test_full_queue_blocks_no_other_task() -> None:
    clock = SystemClock()
    broker = Narrow(MemoryRows(clock))
    shop = Shop(broker, TwoStores(broker, MemoryBackend(MemoryRows(clock)), clock))
    far = shop.say.options(queue="far")
    for number in range(5):
        far.send(f"fill {number}")
    into = [
        shop.say.signature(f"into {number}").then(far.signature(f"out {number}"))
        for number in range(3)
    ]
    with shop.server.new_worker("w", 2, queues=["machinery_tasks"]) as worker:
        assert [one.send().get(timeout=HANG) for one in into] == ["into 0", "into 1", "into 2"]
        assert [shop.say.send(str(number)).get(timeout=HANG) for number in range(20)] == [
            str(number) for number in range(20)
        ]
        assert worker.ready
        assert broker.purge("far") == 5
        wait_until(lambda: len(broker.pending("far", 10)) == 3)
        wait_until(lambda: not any(line.running for line in broker.stats()))
    shop.server.close()


# What fails in between


@pytest.mark.parametrize("call", ["put", "bury", "apply", "outboxes", "clear_outbox", "dispose"])
@pytest.mark.parametrize("lose_reply", [False, True], ids=["refused", "reply lost"])
def test_refusal_is_handled_once_at_any_fault(call: str, lose_reply: bool) -> None:
    clock = SystemClock()
    inner = ChoosyMemory(MemoryRows(clock))
    broker, backend = FlakyBroker(inner), FlakyBackend(MemoryBackend(MemoryRows(clock)))
    shop = Shop(inner, TwoStores(broker, backend, clock))
    bad = (
        shop.say.signature("a")
        | shop.say.options(queue="forbidden").partial().catch(shop.tell.partial())
    ).send()
    for faults in (broker.faults, backend.faults):
        for turn in range(4):
            faults.next_call(call, lose_reply=bool(turn % 2) ^ lose_reply)
    with shop.server.new_worker("w", 2):
        assert WORDS in failed(bad)
        wait_until(
            lambda: (
                bool(shop.told) and not any(line.waiting or line.running for line in broker.stats())
            )
        )
    assert set(shop.dead()) == {(bad.uuid, "refused")}
    assert len(shop.dead()) == 1 or call == "bury"
    assert backend.unsent(10, older_than=0.0) == []
    # An outbox published but not cleared is published again: one of each completes.
    assert len(shop.told) == 1 or call == "clear_outbox"


def test_an_outbox_that_is_refused_lets_the_redelivered_task_go() -> None:
    clock = ManualClock()
    broker = ChoosyMemory(MemoryRows(clock))
    backend = MemoryBackend(MemoryRows(clock))
    shop = Shop(broker, TwoStores(broker, backend, clock))
    bad = (shop.say.signature("a") | shop.say.options(queue="forbidden").partial()).send()
    store, wanted = shop.server.app.store, Exception("killed")
    session = store.open_session(["machinery_tasks"], worker="v")
    [delivery] = session.receive(1, 0.0)
    execution = Execution(shop.server.app, WorkerHooks(), delivery, "v")
    assert accept(execution, peek(execution) and ())
    run_here(Run(execution))
    assert execution.settlement is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "put", raising(wanted))
        with pytest.raises(Exception, match="killed"):
            session.settle([execution.settlement])
    session.close()

    session = store.open_session(["machinery_tasks"], worker="w")
    assert session.receive(1, 0.0) == []

    assert not any(line.waiting or line.running for line in broker.stats())
    assert shop.dead() == [(bad.uuid, "refused")]
    assert shop.server.result(bad.uuid).get_state().state is State.FAILURE
    session.close()
    shop.server.close()


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> Any:
        raise error

    return raise_it
