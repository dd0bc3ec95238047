"""A store against a model of what must be true, under every fault that hypothesis finds.

The model is a few dicts, independent of how a store works: it is told what was asked, and says what
must be seen through the public contract. Checked after every rule (the invariants' numbers in
RELIABILITY 4.1):

    I1  each accepted message is waiting, held, dead or gone, in one of these only
    I4  I5  a run of a task is completed once, with its callbacks once
    I6  a group's callback is sent once, when all members are in or one has failed
    I8  (run, rank of the state) never goes back
    I9  a session that was given up changes nothing
    I10 only a death is a strike, and only for what ran
    I21 each delivery of a task has a greater fence than all before

and, after healing and draining, that nothing is lost (I2), invented (I3) or left over (I20).
"""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Change, Verdict
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.base import Delivery, DeliveryEnd, Fate, Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.rows import RowsConsumer
from machinery_py.brokers.sqlite.broker import SQLiteBroker, SQLiteConsumer
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown
from machinery_py.rows.draft import Draft
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import ClaimReceipt, Claims, MessageStep
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Store, Submission
from machinery_py.stores.rows import RowsSession, RowsStore
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.flaky import FlakySession, FlakyStore
from tests.models.machine import EXAMPLES

pytestmark = pytest.mark.timeout(
    3600 if EXAMPLES else 900
)  # finding the shortest failure takes minutes

RANK = {
    State.PENDING: 0,
    State.RECEIVED: 1,
    State.STARTED: 2,
    State.RETRY: 3,
    State.SUCCESS: 4,
    State.FAILURE: 4,
}
LEASE = 10.0  # seconds
TOKEN_LIFE = 590.0  # seconds; a token is good for 600
MANY = 100_000

Fault = st.sampled_from(["", "", "refuse", "lose"])
Pick = st.integers(0, 30)
Recent = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5, 8])  # 0: the last one


class Bench:
    """A store to be tested, and the way its sessions die."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock

    def crash(self, session: Session, survivors: Sequence[Session]) -> None:
        for _ in range(2):
            self.clock.advance(LEASE * 1.1)
            for survivor in survivors:
                assert survivor.beat()
            self.store.tend()

    def close(self) -> None:
        self.store.close()


@dataclass(eq=False)
class Copy:
    """One message. `place` is waiting, held, dead, gone, or none while nobody has accepted it."""

    message: Message
    run: int
    place: str = "none"
    due: dt.datetime | None = None
    holder: Worker | None = None
    count: int = 0
    strikes: int = 0
    parks: int = 0


@dataclass(eq=False)
class Hand:
    """A delivery as its worker remembers it, for ever, and what it once said about its end."""

    delivery: Delivery
    copy: Copy
    settlement: Settlement | None = None
    sends: list[Copy] = field(default_factory=list)
    settled: bool = False
    running: bool = False


@dataclass(eq=False)
class Worker:
    session: FlakySession
    life: str = "alive"  # or given up, closed
    hands: list[Hand] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    state: State | None = None
    run: int = 0
    group: str = ""
    by: Hand | None = None

    def may_become(self, state: State, run: int) -> bool:
        if self.state is None:
            return True
        if RANK[self.state] == 4 or run < self.run:
            return False
        return run > self.run or RANK[state] > RANK[self.state] or state is self.state


@dataclass(eq=False)
class Group:
    members: list[str]
    arrived: set[str] = field(default_factory=set)
    failed: str = ""
    fired: bool = False

    @property
    def ready(self) -> bool:
        return not self.fired and (bool(self.failed) or len(self.arrived) == len(self.members))


@dataclass(eq=False)
class Sent:
    """A submission, to be repeated with its token."""

    submission: Submission
    copies: list[Copy]
    done_at: float | None = None


class StoreMachine(RuleBasedStateMachine):
    """The rules are what publishers, workers, operators and fate may do."""

    @staticmethod
    def open_bench() -> Bench:
        raise NotImplementedError

    @initialize(members=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def begin(self, members: list[int]) -> None:
        self.bench = self.open_bench()
        self.clock = self.bench.clock
        self.store = FlakyStore(self.bench.store)
        self.numbers = itertools.count(1)
        self.fences: dict[str, int] = {}  # of the last delivery of each task
        self.copies: dict[bytes, Copy] = {}
        self.tasks: dict[str, Task] = {}
        self.groups: dict[str, Group] = {}
        self.sent: list[Sent] = []
        self.workers: list[Worker] = []
        self.revoked: set[str] = set()
        self.seen: dict[str, tuple[int, int]] = {}
        self.open()
        for number in members:
            self.submit(number, 0.0, "")

    # What the model is told

    def copy(self, uuid: str, run: int, delay: float = 0.0) -> Copy:
        eta = self.clock.now() + dt.timedelta(seconds=delay) if delay else None
        body = f"{uuid}/{run}/{next(self.numbers)}".encode()
        message = Message(uuid=uuid, name="add", queue="q", body=body, eta=eta)
        self.copies[body] = Copy(message, run)
        return self.copies[body]

    def accept(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            assert copy.place == "none", f"{copy.message.body!r} was accepted twice"
            copy.place, copy.due = "waiting", copy.message.eta

    def write(self, states: Sequence[TaskState], *, force: bool = False) -> None:
        for state in states:
            task = self.tasks.setdefault(state.task_uuid, Task())
            if force or task.may_become(state.state, state.run):
                task.state, task.run = state.state, state.run
                if force:
                    self.seen.pop(state.task_uuid, None)

    def carry_out(self, sent: Sent) -> None:
        if sent.done_at is None:
            sent.done_at = self.clock.monotonic()
            self.accept(sent.copies)
            self.write(sent.submission.states, force=sent.submission.replay)
            for group in sent.submission.groups:
                self.groups[group.group_uuid] = Group(list(group.task_uuids))

    def submit_through(self, sent: Sent, fault: str) -> None:
        if fault:
            self.store.next_call("submit", lose_reply=fault == "lose")
            with pytest.raises(PublishUnknown if fault == "lose" else PublishRefused):
                self.store.submit(sent.submission)
        else:
            self.store.submit(sent.submission)
        if fault != "refuse":
            self.carry_out(sent)

    # Publishers

    @rule(delay=st.sampled_from([0.0, 5.0]), fault=Fault)
    def submit_one(self, delay: float, fault: str) -> None:
        self.submit(0, delay, fault)

    @rule(members=st.integers(1, 3), fault=Fault)
    def submit_a_chord(self, members: int, fault: str) -> None:
        self.submit(members, 0.0, fault)

    def submit(self, members: int, delay: float, fault: str) -> None:
        uuids = [f"task_{next(self.numbers)}" for _ in range(max(1, members))]
        copies = [self.copy(uuid, 0, delay) for uuid in uuids]
        group = f"group_{next(self.numbers)}" if members else ""
        for uuid in uuids:
            self.tasks[uuid] = Task(group=group)
        sent = Sent(
            Submission(
                token=f"token_{next(self.numbers)}",
                messages=[copy.message for copy in copies],
                states=[TaskState(task_uuid=uuid, task_name="add") for uuid in uuids],
                groups=[GroupMeta(group_uuid=group, task_uuids=tuple(uuids))] if members else [],
            ),
            copies,
        )
        self.sent.append(sent)
        self.submit_through(sent, fault)

    @precondition(lambda self: self.sent)
    @rule(pick=Pick, fault=Fault)
    def submit_again(self, pick: int, fault: str) -> None:
        sent = self.sent[-1 - pick % len(self.sent)]
        if sent.done_at is None or self.clock.monotonic() - sent.done_at < TOKEN_LIFE:
            self.submit_through(sent, fault)

    @precondition(lambda self: self.copies)
    @rule(pick=Pick)
    def publish_a_second_message(self, pick: int) -> None:
        """As a publisher without tokens does whose reply was lost."""
        known = [copy for copy in self.copies.values() if copy.place != "none"]
        if known:
            copy = self.copy(known[pick % len(known)].message.uuid, known[pick % len(known)].run)
            assert self.store.broker.put([copy.message], token="")
            self.accept([copy])

    # Workers

    @precondition(lambda self: sum(worker.life == "alive" for worker in self.workers) < 3)
    @rule(pick=Pick, thaw=st.booleans())
    def start(self, pick: int, thaw: bool) -> None:
        """A new worker, or one that was frozen and taken for dead goes on."""
        frozen = [worker for worker in self.workers if worker.life == "given up"]
        if thaw and frozen:
            worker = frozen[pick % len(frozen)]
            assert worker.session.beat() is False
            worker.life = "alive"
        else:
            self.open()

    def open(self) -> None:
        self.workers.append(Worker(self.store.open_session(["q"], worker="w")))

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.life == "alive"]

    def visible(self) -> set[bytes]:
        broker = self.store.broker
        return {message.body for message in (*broker.pending("q", MANY), *broker.delayed(MANY))}

    @precondition(lambda self: self.alive())
    @rule(pick=Pick, limit=st.integers(1, 4), fault=Fault)
    def claim(self, pick: int, limit: int, fault: str) -> None:
        worker = self.alive()[pick % len(self.alive())]
        before = self.visible()
        if fault:
            self.store.next_call("receive", lose_reply=fault == "lose")
            with pytest.raises(BrokerUnavailable):
                worker.session.receive(limit, 0)
            deliveries = None
        else:
            deliveries = worker.session.receive(limit, 0)
        taken = before - self.visible()
        assert len(taken) <= limit
        for body in taken:
            copy = self.copies[body]
            assert copy.place == "waiting"
            assert copy.due is None or copy.due <= self.clock.now(), (
                f"{body!r} was handed out before its eta"
            )
            copy.place, copy.holder = "held", worker
            if deliveries is None:
                copy.count += 1  # or more: the hands that are known are old ones
        if deliveries is not None:
            assert {delivery.body for delivery in deliveries} == taken
            assert len(deliveries) == len(taken)
            worker.hands += [self.hand(delivery) for delivery in deliveries]
        elif taken:
            self.die(worker)  # it does not know what it holds; only its death brings that back

    def hand(self, delivery: Delivery) -> Hand:
        copy = self.copies[delivery.body]
        assert delivery.count > copy.count
        uuid = copy.message.uuid
        assert delivery.fence > self.fences.get(uuid, 0), "(I21)"
        self.fences[uuid] = delivery.fence
        assert (delivery.strikes, delivery.parks) == (copy.strikes, copy.parks)
        copy.count = delivery.count
        return Hand(delivery, copy)

    def holds(self, worker: Worker, hand: Hand) -> bool:
        copy = hand.copy
        return copy.place == "held" and copy.holder is worker and copy.count == hand.delivery.count

    def choose(self, pick: int, among: Sequence[Worker]) -> tuple[Worker, list[Hand]] | None:
        """A worker, and its hands, those it holds last."""
        busy = [
            worker for worker in among if any(self.holds(worker, hand) for hand in worker.hands)
        ]
        busy = busy or [worker for worker in among if worker.hands]
        if not busy:
            return None
        worker = busy[pick % len(busy)]
        return worker, sorted(worker.hands, key=lambda hand: self.holds(worker, hand))

    @rule(pick=Pick, which=Recent, begins=st.booleans())
    def run(self, pick: int, which: int, begins: bool) -> None:
        """The task is called, or the call has come back."""
        if (chosen := self.choose(pick, self.alive())) is not None:
            worker, hands = chosen
            hand = hands[-1 - which % len(hands)]
            (worker.session.consumer.run_begins if begins else worker.session.consumer.run_ends)(
                hand.delivery
            )
            hand.running = begins

    @rule(pick=Pick, which=Recent, state=st.sampled_from([State.RECEIVED, State.STARTED]))
    def mark(self, pick: int, which: int, state: State) -> None:
        if (chosen := self.choose(pick, self.workers)) is None:
            return
        worker, hands = chosen
        hand = hands[-1 - which % len(hands)]
        change = TaskState(
            task_uuid=hand.copy.message.uuid, task_name="add", state=state, run=hand.copy.run
        )
        assert worker.session.settle([], [Mark(delivery=hand.delivery, state=change)]) == []
        if self.holds(worker, hand):
            self.write([change])

    KINDS = ("succeed", "succeed", "fail", "retry", "retry", "die", "die", "back", "later")

    @precondition(lambda self: self.alive())
    @rule(pick=Pick, limit=st.integers(1, 4), fault=Fault)
    def work_well(self, pick: int, limit: int, fault: str) -> None:
        """As a worker does: settle, and fire the groups that this made ready."""
        self.work(pick, limit, "succeed", 0, "")
        for _ in range(sum(group.ready for group in self.groups.values())):
            self.fire(0, fault)

    @precondition(lambda self: self.alive())
    @rule(
        pick=Pick,
        limit=st.integers(1, 4),
        kind=st.sampled_from(KINDS),
        callbacks=st.integers(0, 2),
        fault=Fault,
    )
    def work(self, pick: int, limit: int, kind: str, callbacks: int, fault: str) -> None:
        """Claim, and settle at once all that is held."""
        worker = self.alive()[pick % len(self.alive())]
        self.claim(pick, limit, "")
        if held := [hand for hand in worker.hands if self.holds(worker, hand)]:
            self.settle_through(worker, held, kind, callbacks, fault)

    @rule(
        pick=Pick,
        which=st.lists(Recent, min_size=1, max_size=3),
        kind=st.sampled_from(KINDS),
        callbacks=st.integers(0, 2),
        fault=Fault,
    )
    def settle(self, pick: int, which: list[int], kind: str, callbacks: int, fault: str) -> None:
        """Of what is held now, or once more of what was settled long ago."""
        if (chosen := self.choose(pick, self.alive())) is not None:
            worker, hands = chosen
            some = {id(hand): hand for hand in (hands[-1 - one % len(hands)] for one in which)}
            self.settle_through(worker, list(some.values()), kind, callbacks, fault)

    @rule(pick=Pick, which=Recent, kind=st.sampled_from(KINDS))
    def settle_too_late(self, pick: int, which: int, kind: str) -> None:
        """Of what was lost when the others gave this worker up."""
        chosen = self.choose(pick, [worker for worker in self.workers if worker.life != "alive"])
        if chosen is not None:
            worker, hands = chosen
            self.settle_through(worker, [hands[-1 - which % len(hands)]], kind, 1, "")

    def settle_through(
        self, worker: Worker, hands: list[Hand], kind: str, callbacks: int, fault: str
    ) -> None:
        for hand in hands:
            if hand.settlement is None:
                self.decide(hand, kind, callbacks)
        settlements = [hand.settlement for hand in hands if hand.settlement is not None]
        if fault:
            self.store.next_call("settle", lose_reply=fault == "lose")
            with pytest.raises(BrokerUnavailable):
                worker.session.settle(settlements)
            if fault == "lose":
                for hand in hands:
                    self.settled(worker, hand, hands)
        verdicts = worker.session.settle(settlements)
        for hand, verdict in zip(hands, verdicts, strict=True):
            assert verdict in self.settled(worker, hand, hands), (
                f"{hand.delivery.body!r}: {verdict}"
            )

    def decide(self, hand: Hand, kind: str, callbacks: int) -> None:
        """What this worker says, now and whenever it repeats it, of the end of this delivery."""
        uuid, run = hand.copy.message.uuid, hand.copy.run
        group = self.tasks[uuid].group
        later = self.clock.now() + dt.timedelta(seconds=5.0)
        if kind in ("back", "later"):
            fate = Fate.BACK if kind == "back" else Fate.LATER
            hand.settlement = Settlement(delivery=hand.delivery, uuid=uuid, fate=fate, eta=later)
            return
        if kind == "retry" and run < 3:
            state, hand.sends = State.RETRY, [self.copy(uuid, run + 1, 5.0 * (callbacks % 2))]
        else:
            state = State.SUCCESS if kind == "succeed" else State.FAILURE
            hand.sends = [self.copy(f"task_{next(self.numbers)}", 0) for _ in range(callbacks)]
        states = [TaskState(task_uuid=uuid, task_name="add", state=state, run=run)]
        if state is not State.RETRY:
            states += [
                TaskState(task_uuid=copy.message.uuid, task_name="add") for copy in hand.sends
            ]
        arrivals = (
            [
                Arrival(
                    group_uuid=group,
                    task_uuid=uuid,
                    total=len(self.groups[group].members),
                    ok=state is State.SUCCESS,
                    callback=b"callback",
                )
            ]
            if group and state is not State.RETRY
            else []
        )
        hand.settlement = Settlement(
            delivery=hand.delivery,
            uuid=uuid,
            name="add",
            states=states,
            send=[copy.message for copy in hand.sends],
            arrivals=arrivals,
            fate=Fate.DEAD if kind == "die" else Fate.DONE,
        )

    def settled(self, worker: Worker, hand: Hand, together: Sequence[Hand]) -> set[Verdict]:
        """Tell the model of the settlement, with those `together`; return the allowed verdicts."""
        settlement, copy = hand.settlement, hand.copy
        assert settlement is not None
        task = self.tasks[copy.message.uuid]
        if not self.holds(worker, hand):
            if not hand.settled:
                return {FENCED}
            later = any(
                other.copy.message.uuid == copy.message.uuid and other.copy.run > copy.run
                for other in together
            )
            return {ALREADY} if task.by is hand and not later else {ALREADY, FENCED}
        copy.place, copy.holder = (
            {Fate.DONE: "gone", Fate.DEAD: "dead"}.get(settlement.fate, "waiting"),
            None,
        )
        if settlement.fate is Fate.LATER:
            copy.due, copy.parks = settlement.eta, copy.parks + 1
        if settlement.states:
            own = settlement.states[0]
            if not task.may_become(own.state, own.run):
                return {FENCED}
            task.by = hand
        hand.settled = True
        self.write(settlement.states)
        self.accept(hand.sends)
        for arrival in settlement.arrivals:
            group = self.groups[arrival.group_uuid]
            if not arrival.ok and arrival.task_uuid not in group.arrived:
                group.failed = group.failed or arrival.task_uuid
            group.arrived.add(arrival.task_uuid)
        return {SETTLED}

    @precondition(lambda self: self.groups)
    @rule(pick=Pick, fault=Fault)
    def fire(self, pick: int, fault: str) -> None:
        names = sorted(self.groups, key=lambda name: not self.groups[name].ready)
        name = names[pick % 3 % len(names)]
        group = self.groups[name]
        if not group.ready and not group.fired:
            return  # the store would do it, as Go's trigger_chord does; nobody asks it to
        copy = self.copy(f"chord_{next(self.numbers)}", 0)
        end = State.FAILURE if group.failed else State.PENDING
        firing = Firing(
            group_uuid=name,
            send=[] if group.failed else [copy.message],
            states=[TaskState(task_uuid=copy.message.uuid, task_name="add", state=end)],
        )
        if fault:
            self.store.next_call("fire", lose_reply=fault == "lose")
            with pytest.raises(BrokerUnavailable):
                self.store.fire(firing)
        first = self.store.fire(firing)
        assert first is (not group.fired and fault != "lose")
        if not group.fired:
            group.fired = True
            self.write(firing.states)
            self.accept([copy] if firing.send else [])

    # Fate

    def die(self, worker: Worker) -> None:
        survivors = [other.session.session for other in self.alive() if other is not worker]
        self.bench.crash(worker.session.session, survivors)
        worker.life = "given up"
        guilty = {
            hand.copy.message.body
            for hand in worker.hands
            if hand.running and self.holds(worker, hand)
        }
        for copy in self.copies.values():
            if copy.holder is worker:
                copy.place, copy.holder = "waiting", None
                copy.strikes += copy.message.body in guilty

    @precondition(lambda self: self.alive())
    @rule(pick=Pick)
    def crash(self, pick: int) -> None:
        self.die(self.alive()[pick % len(self.alive())])

    @precondition(lambda self: self.alive())
    @rule(pick=Pick)
    def close(self, pick: int) -> None:
        worker = self.alive()[pick % len(self.alive())]
        worker.session.close()
        worker.life = "closed"
        for copy in self.copies.values():
            if copy.holder is worker:
                copy.place, copy.holder = "waiting", None

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 8.0]), tend=st.booleans())
    def pass_time(self, seconds: float, tend: bool) -> None:
        for length in (seconds, 0.0):
            for worker in self.alive():
                assert worker.session.beat() is True
            self.clock.advance(length)
        if tend:
            self.store.tend()

    # Operators

    @precondition(lambda self: self.tasks)
    @rule(pick=Pick)
    def revoke(self, pick: int) -> None:
        uuid = list(self.tasks)[pick % len(self.tasks)]
        self.store.backend.revoke([uuid])
        self.revoked.add(uuid)

    def finished(self) -> list[str]:
        """Members of waiting groups come first: a member's second arrival is the most delicate."""
        found = [
            uuid
            for uuid, task in self.tasks.items()
            if task.state in (State.SUCCESS, State.FAILURE)
        ]
        waiting = {
            name for name, group in self.groups.items() if not group.ready and not group.fired
        }
        return sorted(found, key=lambda uuid: self.tasks[uuid].group not in waiting)

    @precondition(lambda self: self.finished())
    @rule(pick=Recent, fault=Fault)
    def replay(self, pick: int, fault: str) -> None:
        uuid = self.finished()[pick % len(self.finished())]
        letters = [
            letter for letter in self.store.broker.dead_letters(limit=MANY) if letter.uuid == uuid
        ]
        assert self.store.broker.take_dead([letter.id for letter in letters]) == letters
        for letter in letters:
            self.copies[letter.body].place = "gone"
        run = self.tasks[uuid].run + 1
        copy = self.copy(uuid, run)
        sent = Sent(
            Submission(
                token=f"token_{next(self.numbers)}",
                messages=[copy.message],
                states=[TaskState(task_uuid=uuid, task_name="add", run=run)],
                replay=True,
            ),
            [copy],
        )
        self.sent.append(sent)
        if fault:
            self.submit_through(sent, fault)
        self.submit_through(sent, "")

    # What must be true

    @invariant()
    def each_message_is_in_one_place(self) -> None:
        broker, now = self.store.broker, self.clock.now()
        pending = [message.body for message in broker.pending("q", MANY)]
        delayed = [message.body for message in broker.delayed(MANY)]
        dead = [letter.body for letter in broker.dead_letters(limit=MANY)]
        everywhere = [*pending, *delayed, *dead]
        waiting = {body for body, copy in self.copies.items() if copy.place == "waiting"}
        held = sum(copy.place == "held" for copy in self.copies.values())

        assert len(everywhere) == len(set(everywhere)), "a message is in two places (I1)"
        assert {*pending, *delayed} == waiting, (
            "what waits is not what was accepted (I1, I3, I5, I6, I9)"
        )
        assert set(dead) == {body for body, copy in self.copies.items() if copy.place == "dead"}, (
            "dead letters (I1)"
        )
        assert sum(line.running for line in broker.stats()) == held, "what is held (I1)"
        for body in pending:
            due = self.copies[body].due
            assert due is None or due <= now, "waiting before its eta (I13)"

    @invariant()
    def each_task_is_as_far_as_it_was_brought(self) -> None:
        states = self.store.backend.get_states(list(self.tasks))
        found = {uuid: (state.state, state.run) for uuid, state in states.items()}
        brought = {
            uuid: (task.state, task.run)
            for uuid, task in self.tasks.items()
            if task.state is not None
        }
        assert found == brought, "(I4, I9)"
        for uuid, (state, run) in found.items():
            assert self.seen.get(uuid, (0, 0)) <= (run, RANK[state]), f"{uuid} went back (I8)"
            self.seen[uuid] = run, RANK[state]
        assert self.store.backend.revoked(list(self.tasks)) == self.revoked

    @invariant()
    def the_groups_that_wait_are_those_that_are_ready(self) -> None:
        ready = {group.group_uuid: group.failed_member for group in self.store.ready_groups(MANY)}
        assert ready == {
            name: group.failed for name, group in self.groups.items() if group.ready
        }, "(I6)"
        for name, group in self.groups.items():
            meta = self.store.backend.get_group(name)
            assert meta is not None
            assert (list(meta.task_uuids), meta.chord_triggered) == (group.members, group.fired)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        try:
            self.drain()
        finally:
            self.bench.close()

    def drain(self) -> None:
        """Heal, let one good worker do everything, and look what is left."""
        self.store.faults.heal()
        for _ in range(len(self.alive()) // 2):
            self.crash(0)
        while self.alive():
            self.close(0)
        self.clock.advance(60.0)
        self.store.tend()
        self.open()
        for _ in range(2 * len(self.copies) + 10):
            self.claim(0, 4, "")
            worker = self.alive()[0]
            held = [hand for hand in worker.hands if self.holds(worker, hand)]
            if held:
                self.settle_through(worker, held, "succeed", 0, "")
            elif any(group.ready for group in self.groups.values()):
                self.fire(0, "")
            else:
                break
        self.close(0)

        assert {copy.place for copy in self.copies.values()} <= {"gone", "dead", "none"}, (
            "something never ended (I2)"
        )
        accepted = {copy.message.uuid for copy in self.copies.values() if copy.place != "none"}
        assert all(self.tasks[uuid].state in (State.SUCCESS, State.FAILURE) for uuid in accepted), (
            "(I2)"
        )
        (line,) = self.store.broker.stats()
        assert (line.waiting, line.running, line.delayed) == (0, 0, 0), "(I20)"
        assert self.store.broker.workers() == [], "(I20)"
        assert self.store.backend.unsent(MANY, older_than=0.0) == [], "(I20)"
        for check in (
            self.each_message_is_in_one_place,
            self.each_task_is_as_far_as_it_was_brought,
        ):
            check()


def run(open_bench: Callable[[], Bench], *, examples: int, steps: int, same: bool = False) -> None:
    """`same`: the same examples each time, even if others are asked for, and failures unshrunk."""
    machine = type("Machine", (StoreMachine,), {"open_bench": staticmethod(open_bench)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples if same else EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=same or not EXAMPLES,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
            report_multiple_bugs=False,
            print_blob=True,
            phases=[Phase.generate] if same else [Phase.generate, Phase.shrink],
        ),
    )


def memory_bench(
    *,
    broker: type[MemoryBroker] = MemoryBroker,
    backend: type[MemoryBackend] = MemoryBackend,
    store: type[RowsStore] = RowsStore,
) -> Bench:
    clock = ManualClock()
    hub = MemoryRows(clock)
    return Bench(store(broker(hub, lease=LEASE), backend(hub, expire_in=1e7)), clock)


class SQLiteBench(Bench):
    """A file of its own. A session dies with the lock on its session's file."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        clock = ManualClock()
        self._driver = SQLiteDriver(
            f"{self._folder.name}/machinery.db", clock=clock, synchronous="NORMAL"
        )
        backend = SQLiteBackend(self._driver, expire_in=1e7)
        super().__init__(RowsStore(SQLiteBroker(self._driver), backend), clock)

    def crash(self, session: Session, survivors: Sequence[Session]) -> None:
        assert isinstance(session, RowsSession)
        assert isinstance(session.consumer, SQLiteConsumer)
        session.consumer.abandon()
        self.store.tend()

    def close(self) -> None:
        super().close()
        self._driver.close()
        self._folder.cleanup()


def test_the_memory_store_keeps_every_promise_under_faults() -> None:
    run(memory_bench, examples=100, steps=80)  # `make chaos` has ten times as many, and others


def test_the_sqlite_store_keeps_every_promise_under_faults() -> None:
    run(SQLiteBench, examples=40, steps=60)


# The machine must be able to fail: each of these stores lacks one mechanism, which must be noticed.


class _NeverFencedSession(RowsSession):
    """Settles what it does not hold."""

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        verdicts = super().settle(settlements, marks)
        for at, settlement in enumerate(settlements):
            if verdicts[at] == FENCED:
                change = Change(key=settlement.uuid, states=settlement.states)
                [verdicts[at]] = self._store.backend.apply([change])
                if verdicts[at] == SETTLED and settlement.send:
                    self._store.broker.put(settlement.send, token="")
        return verdicts


class _NeverFencedStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return _NeverFencedSession(self, self.broker.consume(queues, worker=worker))


class _UnguardedMarksSession(RowsSession):
    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        self._store.backend.apply(
            [Change(key=mark.state.task_uuid, states=(mark.state,)) for mark in marks]
        )
        return super().settle(settlements)


class _UnguardedMarksStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return _UnguardedMarksSession(self, self.broker.consume(queues, worker=worker))


class _ForgettingRepeatsSession(RowsSession):
    """Takes its own repeat after a lost reply for somebody else's work."""

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        verdicts = super().settle(settlements, marks)
        return [FENCED if one == ALREADY else one for one in verdicts]


class _ForgettingRepeatsStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return _ForgettingRepeatsSession(self, self.broker.consume(queues, worker=worker))


class _SendsAnywaySession(RowsSession):
    """Sends the callbacks before it knows whether the delivery is its own."""

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        send = [message for settlement in settlements for message in settlement.send]
        self._store.broker.put(send, token="")
        return super().settle([_without_messages(settlement) for settlement in settlements], marks)


def _without_messages(settlement: Settlement) -> Settlement:
    return Settlement(
        delivery=settlement.delivery,
        uuid=settlement.uuid,
        name=settlement.name,
        fate=settlement.fate,
        states=settlement.states,
        arrivals=settlement.arrivals,
        eta=settlement.eta,
    )


class _SendsAnywayStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return _SendsAnywaySession(self, self.broker.consume(queues, worker=worker))


class _TokenlessStore(RowsStore):
    """Carries a submission out as often as it is asked to."""

    def submit(self, submission: Submission) -> bool:
        return super().submit(
            Submission(
                token="",
                messages=submission.messages,
                states=submission.states,
                groups=submission.groups,
                replay=submission.replay,
            )
        )


class _HalfSubmittingStore(RowsStore):
    """Repeats the states of a submission though its messages were there."""

    def submit(self, submission: Submission) -> bool:
        self.broker.put(submission.messages, token=submission.token)
        verdicts = self.backend.apply(
            [
                Change(
                    key="x",
                    states=submission.states,
                    groups=submission.groups,
                    force=submission.replay,
                )
            ]
        )
        return verdicts == [SETTLED]


class _FiringTwiceStore(RowsStore):
    def fire(self, firing: Firing) -> bool:
        if not super().fire(firing):
            self.broker.put(firing.send, token="")
            return False
        return True


class _CountingBackend(MemoryBackend):
    """Counts arrivals; a member that is to arrive twice counts twice."""

    def __init__(self, rows: MemoryRows, *, expire_in: float) -> None:
        super().__init__(rows, expire_in=expire_in)
        self._counts = collections.Counter[str]()

    def _arrive(self, arrival: Arrival, draft: Draft) -> None:
        super()._arrive(arrival, draft)
        self._counts[arrival.group_uuid] += 1
        if draft.joins and self._counts[arrival.group_uuid] >= arrival.total:
            *joins, last = draft.joins
            draft.joins = (*joins, msgspec.structs.replace(last, whole=1))


class _OverwritingBackend(MemoryBackend):
    """Lets any state follow any other."""

    def plan(self, change: Change, draft: Draft, tasks: dict[str, Any] | None = None) -> Verdict:
        return super().plan(msgspec.structs.replace(change, epoch=0, force=True), draft, tasks)


class _MarklessBackend(MemoryBackend):
    def _save(self, uuid: str, row: Any, draft: Draft) -> None:
        super()._save(uuid, msgspec.structs.replace(row, mark="", epoch=0), draft)


class _TamperingBroker(MemoryBroker):
    """Base of those that reach into the store."""

    rows: MemoryRows

    def forget(self, session: str) -> None:
        """Let the messages that a consumer holds vanish."""
        for message in self.held(session):
            receipt = ClaimReceipt(session, message.id, message.count)
            self.rows.commit([MessageStep(takes=(receipt,))])

    def held(self, session: str) -> list[Any]:
        """Return the messages that a consumer holds."""
        hold = self.rows.all_holds.get(session)
        return [] if hold is None else list(hold.kept.messages.values())


class _LosingBroker(_TamperingBroker):
    """What a dead consumer held dies with it."""

    def tend(self) -> float:
        for hold in list(self.rows.all_holds.values()):
            if hold.is_stalled():
                self.forget(hold.id)
        return super().tend()


class _PoppingConsumer(RowsConsumer):
    def _claim(self, limit: int, order: Sequence[str]) -> Claims:
        claims = super()._claim(limit, order)
        if len(claims.found) > 2:
            assert isinstance(self._broker, _TamperingBroker)
            self._broker.forget(self.session)
        return claims


class _PoppingBroker(_TamperingBroker):
    """Hands messages out without remembering to whom, as BLPOP does."""

    def consume(self, queues: Sequence[str], *, worker: str) -> RowsConsumer:
        return _PoppingConsumer(self, tuple(queues), worker)


class _RobbingBroker(_TamperingBroker):
    """Gives the messages of a silent consumer to others and leaves them with it too."""

    def __init__(self, rows: MemoryRows, *, lease: float) -> None:
        super().__init__(rows, lease=lease)
        rows.are_there = lambda receipts: True  # type: ignore[method-assign]  # the fault
        rows.move = self._move  # type: ignore[method-assign]

    def _move(self, step: MessageStep, told: set[str]) -> None:
        there = tuple(
            one for one in step.takes if one.id in {held.id for held in self.held(one.hold)}
        )
        known = {one.id for one in there}
        pushes = tuple(one for one in step.pushes if one.id is None or one.id in known)
        left = msgspec.structs.replace(step, takes=there, pushes=pushes)
        MemoryRows.move(self.rows, left, told)


class _BlamingBroker(_TamperingBroker):
    """Counts every return as a strike."""

    def plan_end(
        self, disposal: DeliveryEnd, delivery: Delivery, session: str, step: MessageStep
    ) -> None:
        for message in self.held(session):
            if message.id == delivery.receipt.id and disposal.fate is Fate.BACK:
                message.strikes += 1
        super().plan_end(disposal, delivery, session, step)


class _BlindBroker(_TamperingBroker):
    """Blames all that a dead consumer held, whatever of it ran."""

    def tend(self) -> float:
        for session in self.rows.all_holds:
            for message in self.held(session):
                message.runs = True
        return super().tend()


class _HastyBroker(MemoryBroker):
    """Puts what is to wait for its eta on the queue at once when it comes back."""

    def plan_end(
        self, disposal: DeliveryEnd, delivery: Delivery, session: str, step: MessageStep
    ) -> None:
        if disposal.fate is Fate.LATER:
            disposal = msgspec.structs.replace(disposal, eta=None)
        super().plan_end(disposal, delivery, session, step)


class _KeepingConsumer(RowsConsumer):
    """Keeps what it held when it closes."""

    def close(self) -> None:
        assert isinstance(self._broker, _TamperingBroker)
        self._broker.forget(self.session)
        super().close()


class _KeepingBroker(_TamperingBroker):
    def consume(self, queues: Sequence[str], *, worker: str) -> RowsConsumer:
        return _KeepingConsumer(self, tuple(queues), worker)


BROKEN: dict[str, Callable[[], Bench]] = {
    "settling what is not held": lambda: memory_bench(store=_NeverFencedStore),
    "marks of lost deliveries": lambda: memory_bench(store=_UnguardedMarksStore),
    "repeats taken for theft": lambda: memory_bench(store=_ForgettingRepeatsStore),
    "callbacks before the fence": lambda: memory_bench(store=_SendsAnywayStore),
    "no tokens": lambda: memory_bench(store=_TokenlessStore),
    "tokens for messages only": lambda: memory_bench(store=_HalfSubmittingStore),
    "chords fired twice": lambda: memory_bench(store=_FiringTwiceStore),
    "members counted, not collected": lambda: memory_bench(backend=_CountingBackend),
    "states that go back": lambda: memory_bench(backend=_OverwritingBackend),
    "no marks": lambda: memory_bench(backend=_MarklessBackend),
    "held messages die with their consumer": lambda: memory_bench(broker=_LosingBroker),
    "messages popped": lambda: memory_bench(broker=_PoppingBroker),
    "messages copied from the dead": lambda: memory_bench(broker=_RobbingBroker),
    "strikes for the innocent": lambda: memory_bench(broker=_BlamingBroker),
    "strikes for what did not run": lambda: memory_bench(broker=_BlindBroker),
    "parked messages at once": lambda: memory_bench(broker=_HastyBroker),
    "closing keeps": lambda: memory_bench(broker=_KeepingBroker),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_model_notices(fault: str) -> None:
    with pytest.raises(AssertionError):
        run(BROKEN[fault], examples=1000, steps=80, same=True)
