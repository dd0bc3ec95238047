"""What is a Redis Cluster's own: names, slots that stand still, Go's delayed set, records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from machinery_py.backends.base import SETTLED, Change, Rider, sending_key
from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.backends.redis.cluster_documents import parts_with
from machinery_py.brokers.base import Delivery, Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.redis.cluster import FOR_EVER, ClusterBroker, name_of_move
from machinery_py.brokers.redis.messages import EMPTY
from machinery_py.brokers.redis.scripts import GO_GONE
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.requests import Request, command_at
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Store, Submission, change_in
from machinery_py.stores.outbox import Outbox, TwoStores
from machinery_py.stores.redis import ClusterStore
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.conformance.claims import claim
from machinery_py.testing.conformance.fencing import (
    body_of,
    drain,
    message_of,
    settlement,
    state_of,
    submit,
)
from machinery_py.testing.conformance.groups import listed
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.stores.redis_cluster.case import ClusterClock, Clusters, clock, open_cluster
from tests.support.servers import RedisCluster as ClusterServers
from tests.support.servers import RedisServer, ReplyError

__all__ = ["clock", "open_cluster"]

OpenStore = Callable[[], ClusterStore]


@pytest.fixture
def open_store(open_cluster: Clusters, clock: ClusterClock) -> OpenStore:
    def open_one() -> ClusterStore:
        cluster = open_cluster()
        return ClusterStore(ClusterBroker(cluster), ClusterBackend(cluster), clock)

    return open_one


@pytest.mark.parametrize("uuid", ["{", "}", "{}", "a{b}c", "50%", "task_{x", "é}"])
def test_uuid_may_be_any_text(open_store: OpenStore, uuid: str) -> None:
    store = open_store()
    submit(store, uuid)
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(1, 0)

    assert session.settle([settlement(delivery, callbacks=[f"{uuid}{{after}}"])]) == [SETTLED]

    assert store.backend.get_state(uuid).state is State.SUCCESS
    assert store.backend.get_state(uuid).task_uuid == uuid
    assert {state.task_uuid for state in listed(store.backend)} == {uuid, f"{uuid}{{after}}"}
    assert store.backend.find(uuid[:1], 9) == sorted([uuid, f"{uuid}{{after}}"])
    session.close()


def test_a_queue_may_bring_its_own_tag(open_store: OpenStore) -> None:
    store = open_store()
    for queue in ("mail", "{mail}", "{mail}:fast", "fast{mail}{x}"):
        store.broker.put([Message(uuid="", name="", queue=queue, body=queue.encode())], token="")

    assert [one.waiting for one in store.broker.stats()] == [1] * 4
    for queue in ("}", "{}", "a}b", ""):
        with pytest.raises(PublishRefused, match="several slots"):
            store.broker.put([Message(uuid="", name="", queue=queue, body=b"x")], token="")


def test_a_slot_that_is_on_its_way_stands_still(
    empty_cluster: ClusterServers, clock: ClusterClock
) -> None:
    cluster = RedisClusterDriver(empty_cluster.url, clock=clock, timeout=0.3)
    broker, backend = ClusterBroker(cluster), ClusterBackend(cluster)
    store = ClusterStore(broker, backend, clock)
    submit(store, "a")
    source = empty_cluster.node_of("q")
    target = next(node for node in empty_cluster.masters if node is not source)
    slot = int(str(source.cli("CLUSTER", "KEYSLOT", "q")))
    target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", str(source.cli("CLUSTER", "MYID")))
    source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", str(target.cli("CLUSTER", "MYID")))

    try:
        with pytest.raises(BrokerUnavailable, match="is on its way|has moved"):
            broker.put([Message(uuid="", name="", queue="q", body=b"x")], token="t")
        broker.put([Message(uuid="", name="", queue="elsewhere", body=b"x")], token="t")
        assert (source.cli("LLEN", "q"), source.cli("KEYS", "mpy:{q}:mpy:p:t")) == (1, [])
        # Otherwise a script that names a remaining key would begin and stop after its first write.
        with pytest.raises(ReplyError, match="non local key"):
            source.cli(
                "EVAL", "redis.call('RPUSH', 'q', 'half'); redis.call('GET', '{q}gone')", 1, "q"
            )
        assert source.cli("RPOP", "q") == "half"
    finally:
        for node in (source, target):
            node.cli("CLUSTER", "SETSLOT", slot, "STABLE")

    assert broker.put([Message(uuid="", name="", queue="q", body=b"x")], token="t")
    assert [one.body for one in broker.pending("q", 9)] == [body_of("a"), b"x"]
    cluster.close()


def test_a_cluster_that_is_away_is_told_as_one_redis_would(clock: ClusterClock) -> None:
    cluster = RedisClusterDriver("redis://127.0.0.1:1,127.0.0.1:2", clock=clock, timeout=0.2)

    with pytest.raises(BrokerUnavailable, match="naming queues"):
        ClusterBroker(cluster).put([Message(uuid="", name="", queue="q", body=b"x")], token="t")
    with pytest.raises(BackendUnavailable, match="reading states"):
        ClusterBackend(cluster).get_states(["a"])


@pytest.mark.parametrize("token", ["", "t"])
def test_a_lost_reply_is_told_and_a_repeat_doubles_nothing(
    empty_cluster: ClusterServers, open_cluster: Clusters, clock: ClusterClock, token: str
) -> None:
    cluster = RedisClusterDriver(empty_cluster.url, clock=clock, timeout=0.3)
    broker = ClusterBroker(cluster)

    def is_warm() -> bool:
        try:
            broker.put([Message(uuid="", name="", queue="q", body=b"first")], token="first")
        except (BrokerUnavailable, PublishUnknown):
            return False  # the timeout is short, and this machine is busy
        return True

    wait_until(is_warm)
    node = empty_cluster.node_of("q")
    message = Message(uuid="", name="", queue="q", body=b"second")

    node.freeze()
    try:
        with pytest.raises(PublishUnknown, match="publishing"):
            broker.put([message], token=token)
    finally:
        node.thaw()
    cluster.close()
    patient = ClusterBroker(open_cluster())
    if token:
        patient.put([message], token=token)

    found = [one.body for one in patient.pending("q", 9)]
    assert found.count(b"second") <= 1
    if (
        token and empty_cluster.node_of("q") is node
    ):  # else its replica took it for dead, and knows what it knows
        assert found == [b"first", b"second"]


def test_one_redis_is_no_cluster(redis_server: RedisServer, clock: ClusterClock) -> None:
    cluster = RedisClusterDriver(redis_server.url, clock=clock)

    with pytest.raises(StoreUnusable, match="no node of a cluster"):
        ClusterBackend(cluster).get_states(["a"])


def delay_as_go(empty_cluster: ClusterServers, uuid: str, queue: str, score: int) -> bytes:
    body = body_of(uuid, queue=queue)
    empty_cluster.node_of("delayed_tasks").cli("ZADD", "delayed_tasks", score, body)
    return body


def test_message_delayed_by_go_reaches_its_queue_once(
    empty_cluster: ClusterServers, open_store: OpenStore, clock: ClusterClock
) -> None:
    now = int(clock.now().timestamp()) * 10**9
    bodies = [delay_as_go(empty_cluster, f"task_{n}", f"q{n % 5}", now - n) for n in range(50)]
    late = delay_as_go(empty_cluster, "late", "q0", now + 60 * 10**9)

    together(4, lambda _: open_store().broker.tend())

    broker = open_store().broker
    found = [one.body for n in range(5) for one in broker.pending(f"q{n}", 99)]
    assert sorted(found) == sorted(bodies)
    assert [one.body for one in broker.delayed(9)] == [late]
    assert [one.delayed for one in broker.stats() if one.queue == "q0"] == [1]
    assert broker.purge("q0") == 11
    assert broker.delayed(9) == []


def test_move_has_the_same_name_on_every_version_of_redis() -> None:
    assert name_of_move(b"body", b"1.79e+18") == name_of_move(b"body", b"1790000000000000000")
    assert name_of_move(b"body", b"1.79e+18") != name_of_move(b"body", b"1790000000000000256")


@pytest.mark.parametrize(
    ("score", "left"), [("1.79e+18", 0), ("1790000000000000000", 0), ("1790000000000000256", 1)]
)
def test_moved_message_goes_however_its_score_is_written(
    empty_cluster: ClusterServers, open_store: OpenStore, score: str, left: int
) -> None:
    body = delay_as_go(empty_cluster, "task_1", "q", 1_790_000_000_000_000_000)
    broker = open_store().broker
    assert isinstance(broker, ClusterBroker)

    broker._run_at_go(GO_GONE, [(raw(body), raw(score.encode()))])

    assert len(broker.delayed(9)) == left


def test_a_move_that_was_cut_off_is_finished(
    empty_cluster: ClusterServers, open_store: OpenStore, clock: ClusterClock
) -> None:
    score = int(clock.now().timestamp()) * 10**9
    body = delay_as_go(empty_cluster, "task_1", "q", score)
    broker = open_store().broker
    assert isinstance(broker, ClusterBroker)
    (stored,) = broker.cluster.ask([command_at(b"ZSCORE", b"delayed_tasks", body)], doing="looking")
    # The first mover has put it on its queue, and died.
    broker._register(["q"])
    broker._of("q").put_once(
        [(name_of_move(body, stored), (0, 0, 0, EMPTY, 0, raw(body)))], FOR_EVER
    )

    open_store().broker.tend()

    assert [one.body for one in broker.pending("q", 9)] == [body]
    assert broker.delayed(9) == []
    # A mover that comes too late does nothing.
    assert broker._of("q").put_once([("other", (0, 0, 0, EMPTY, 0, raw(body)))], 1) is False
    assert len(broker.pending("q", 9)) == 1


def test_consumer_blocked_on_one_queue_is_woken_by_another(open_store: OpenStore) -> None:
    session = open_store().open_session(["q", "r", "s"], worker="w")
    broker = open_store().broker
    found: list[Delivery] = []
    for queue in ("r", "q", "s"):
        found.clear()
        sleeper = threading.Thread(target=lambda: found.extend(session.receive(1, HANG)))
        sleeper.start()
        broker.put(
            [Message(uuid="", name="", queue=queue, body=body_of("a", queue=queue))], token=""
        )
        sleeper.join(HANG)
        assert [one.queue for one in found] == [queue]
    session.consumer.wake()
    session.close()
    assert broker.workers() == []


def test_an_outbox_that_is_published_twice_is_sent_once(open_store: OpenStore) -> None:
    store = open_store()
    submit(store, "a")
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(1, 0)
    end = settlement(delivery, callbacks=["c"])
    outbox = [msgspec.json.encode(message) for message in end.send]
    store.backend.apply([Change(key="a", mark="m", states=end.states, outbox=outbox)])

    together(4, lambda _: open_store().publish([Outbox("a", outbox)]))

    assert len(store.broker.pending("c", 9)) == 1
    assert store.backend.unsent(9, older_than=0.0) == []
    session.close()


def test_a_record_that_was_written_since_is_not_cleared(
    open_cluster: Clusters, clock: ClusterClock
) -> None:
    backend = ClusterBackend(open_cluster())
    retry = TaskState(task_uuid="t", state=State.RETRY)
    backend.apply([Change(key="t", mark="1", states=(retry,), outbox=(b"first",))])
    other = ClusterBackend(open_cluster())
    other.apply(
        [
            Change(
                key="t",
                mark="2",
                states=(state_of("t", State.SUCCESS, run=1),),
                outbox=(b"second",),
            )
        ]
    )

    backend.clear_outbox([("t", (b"first",))])

    assert [list(box) for box in backend.outboxes(["t"])] == [[b"second"]]
    clock.advance(1.0)
    assert backend.unsent(9, older_than=0.0) == [("t", (b"second",))]


def test_a_note_without_a_record_is_dropped(open_cluster: Clusters, clock: ClusterClock) -> None:
    backend = ClusterBackend(open_cluster())
    backend._steps._note(["t"])  # and its process died
    assert backend.unsent(9, older_than=0.0) == []
    assert [name for name, _, _ in backend._steps.noted(9, 0.0)] == ["t"]

    clock.advance(61.0)

    assert backend.unsent(9, older_than=0.0) == []
    wait_until(lambda: backend._steps.noted(9, 0.0) == [])


# A Go program settles a group so: it takes a mutex, reads the document, and writes it with its flag
# if there was none.

MUTEX = "TriggerChordMutex"
GROUP = "group_1"


def complete_group(backend: ClusterBackend, *, ok: bool = True) -> None:
    backend.init_group(GROUP, ["a"])
    arrival = Arrival(group_uuid=GROUP, task_uuid="a", total=1, ok=ok, callback=b"c")
    state = state_of("a", State.SUCCESS if ok else State.FAILURE)
    assert backend.apply([Change(key="a", mark="m", states=(state,), arrivals=(arrival,))]) == [
        SETTLED
    ]
    assert [one.group_uuid for one in backend.ready_groups(9)] == [GROUP]


def settle_as_go(cluster: ClusterServers, read: str | None = None) -> bool:
    """What Go does while it holds its mutex. `read`: the document, if it was read before."""
    node = cluster.node_of(GROUP)
    read = read or str(node.cli("GET", GROUP))
    meta = json.loads(read)
    if meta["ChordTriggered"]:
        return False
    meta["ChordTriggered"] = True
    node.cli("SET", GROUP, json.dumps(meta, separators=(",", ":")))
    return True


def test_a_group_that_go_has_settled_is_not_fired(
    empty_cluster: ClusterServers, open_cluster: Clusters
) -> None:
    backend = ClusterBackend(open_cluster())
    complete_group(backend)
    assert settle_as_go(empty_cluster)

    assert backend.trigger_chord(GROUP) is False
    assert backend.ready_groups(9) == []


@pytest.mark.parametrize("read", ["before", "after"])
def test_chord_is_fired_by_one_side_and_never_under_gos_mutex(
    empty_cluster: ClusterServers, open_cluster: Clusters, read: str
) -> None:
    backend = ClusterBackend(open_cluster())
    complete_group(backend)
    mutex = empty_cluster.node_of(MUTEX)
    mutex.cli("SET", MUTEX, "go", "NX", "PX", 60_000)
    document = str(empty_cluster.node_of(GROUP).cli("GET", GROUP))

    assert backend.trigger_chord(GROUP) is False
    assert backend.trigger_chord(GROUP) is False
    assert [one.group_uuid for one in backend.ready_groups(9)] == [GROUP]
    # Go has read it before we have flagged it, or reads it after that.
    theirs = settle_as_go(empty_cluster, document if read == "before" else None)
    mutex.cli("DEL", MUTEX)

    assert theirs is (read == "before")
    assert backend.trigger_chord(GROUP) is (not theirs)
    assert backend.trigger_chord(GROUP) is False
    assert settle_as_go(empty_cluster) is False
    wait_until(lambda: backend.ready_groups(9) == [])


def test_group_with_a_failed_member_is_failed_beside_go(
    empty_cluster: ClusterServers, open_cluster: Clusters
) -> None:
    backend = ClusterBackend(open_cluster())
    complete_group(backend, ok=False)
    assert settle_as_go(empty_cluster)
    empty_cluster.node_of(MUTEX).cli("SET", MUTEX, "go", "NX", "PX", 60_000)

    assert sorted(together(4, lambda _: ClusterBackend(open_cluster()).trigger_chord(GROUP))) == [
        False,
        False,
        False,
        True,
    ]


def test_flagged_group_is_fired_by_one_of_many(open_cluster: Clusters) -> None:
    backend = ClusterBackend(open_cluster())
    complete_group(backend)

    assert sorted(together(8, lambda _: ClusterBackend(open_cluster()).trigger_chord(GROUP))) == [
        False
    ] * 7 + [True]
    group = backend.get_group(GROUP)
    assert group is not None and group.chord_triggered


class Slow(RedisClusterDriver):
    """Lets something happen before it looks at Go's mutex."""

    def __init__(self, url: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(url)
        self._meanwhile = meanwhile

    def ask(self, requests: Sequence[Request], **options: Any) -> list[Any]:
        if any(
            MUTEX.encode() in request.packet and b"EXISTS" in request.packet for request in requests
        ):
            self._meanwhile()
        return super().ask(requests, **options)


def test_gos_change_between_our_flag_and_its_mutex_is_seen(
    empty_cluster: ClusterServers, open_cluster: Clusters
) -> None:
    complete_group(ClusterBackend(open_cluster()))
    document = str(
        empty_cluster.node_of(GROUP).cli("GET", GROUP)
    )  # read with the mutex, before our flag
    slow = Slow(empty_cluster.url, lambda: settle_as_go(empty_cluster, document))

    backend = ClusterBackend(slow)
    assert backend.trigger_chord(GROUP) is False
    assert backend.ready_groups(9) == []
    slow.close()


def test_tick_of_a_dead_sender_is_sent_after_a_late_second(
    open_store: OpenStore, open_cluster: Clusters, clock: ClusterClock
) -> None:
    late = open_store()
    message = Message(uuid="task_1", name="add", queue="q", body=body_of("task_1"))
    group = GroupMeta(group_uuid="group_1", task_uuids=("task_1",))
    tick = Submission(
        token="tick s now",
        messages=[message],
        states=[state_of("task_1", State.PENDING)],
        groups=[group],
        riders=[Rider(name="s", expected=None, body=b"1")],
    )
    # After the schedule and the record were written, before anything else.
    backend = ClusterBackend(open_cluster())
    change = change_in(tick, [msgspec.json.encode(message)])
    assert backend._steps.amend(
        b"s",
        b"",
        b"1",
        parts_with(change.riders[0], change, clock.now(), backend.cluster.now(), 60),
    )
    assert late.submit(tick) is False
    assert backend.get_states(["task_1"]) == {}

    clock.advance(6.0)
    late.tend()

    assert [one.body for one in late.broker.pending("q", 9)] == [message.body]
    assert late.backend.get_state("task_1").state is State.PENDING
    assert late.backend.get_group("group_1") is not None
    assert late.backend.records().bodies == {"s": b"1"}
    clock.advance(70.0)
    late.tend()
    assert len(late.broker.pending("q", 9)) == 1
    assert late.backend.unsent(9, older_than=0.0) == []


class Died(BaseException):
    """Stands for SIGKILL: nobody catches it."""


class Mortal(RedisClusterDriver):
    """Its process dies before one of its steps."""

    left = -1  # steps that it lives for

    def ask(self, requests: Sequence[Request], **options: Any) -> list[Any]:
        if self.left == 0:
            raise Died
        self.left -= 1
        return super().ask(requests, **options)


@pytest.mark.parametrize("beside", [False, True], ids=["one cluster", "two stores"])
def test_a_unique_send_that_is_cut_off_anywhere_is_made_or_not(
    empty_cluster: ClusterServers, open_cluster: Clusters, clock: ClusterClock, beside: bool
) -> None:
    mortal = Mortal(empty_cluster.url, clock=clock)
    memory = MemoryBroker(MemoryRows(clock))

    def open_one(cluster: RedisClusterDriver) -> Store:
        backend = ClusterBackend(cluster)
        return (
            TwoStores(memory, backend, clock)
            if beside
            else ClusterStore(ClusterBroker(cluster), backend, clock)
        )

    dying, heir = open_one(mortal), open_one(open_cluster())
    sent: list[str] = []
    number, dies, taken = 0, True, 0
    while dies:
        name = f"key {number}"
        mortal.left = number
        try:
            assert claim(dying, name, None, b"1", f"t{number}")
            dies = False
        except Died:
            pass

        if heir.backend.claims([name]) == [None]:
            assert claim(heir, name, None, b"2", f"u{number}")
            sent.append(f"u{number}")
        else:  # whoever reads it finds its task: else it would look as if that were over
            assert heir.backend.get_state(f"t{number}").state is State.PENDING
            assert not claim(heir, name, None, b"2", f"u{number}")
            sent.append(f"t{number}")
            taken += dies
        number += 1
    clock.advance(6.0)
    heir.tend()

    found = drain(heir, "q")
    assert (set(found), len(found) >= len(sent)) == (set(sent), True)
    if not beside:
        assert len(found) == len(sent)
    assert heir.backend.unsent(9, older_than=0.0) == []
    assert 2 <= taken < number - 1
    mortal.close()


def test_unfinished_steps_of_a_claim_outlive_the_claim(
    open_store: OpenStore, open_cluster: Clusters, clock: ClusterClock
) -> None:
    """Its window is over and another has the key, before the message of the first was published."""
    heir = open_store()
    first = Change(
        key=sending_key("a", "t"),
        states=[state_of("t")],
        outbox=[msgspec.json.encode(message_of("t"))],
        riders=[Rider(name="a", expected=None, body=b"1", life=50.0)],
    )
    assert ClusterBackend(open_cluster()).apply([first]) == [SETTLED]
    # Marked by its worker, and still shown with what is owed.
    assert heir.backend.amend(Rider(name="a", expected=b"1", body=b"started", life=50.0))
    assert heir.backend.claims(["a"]) == [b"started"]
    clock.advance(60.0)
    assert heir.backend.claims(["a"]) == [None]
    assert claim(heir, "a", None, b"2", "u")
    clock.advance(6.0)
    heir.tend()

    assert sorted(drain(heir, "q")) == ["t", "u"]
    clock.advance(70.0)
    heir.tend()
    assert heir.backend._steps.noted(9, 0.0) == []  # type: ignore[attr-defined]
