"""A large submission: staged, committed, and carried out step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from machinery_py.backends.base import Change, Rider
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.bounds import STEP_ITEMS
from machinery_py.brokers.base import Message
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.errors import NameRefused, PublishRefused, PublishUnknown, QueueFull
from machinery_py.stores import redis_steps
from machinery_py.stores.base import Submission
from machinery_py.stores.redis import RedisStore, is_plain
from machinery_py.stores.redis_steps import StagedSteps
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.models.beside import Beside
from tests.support.servers import RedisServer

UUIDS = [f"task_{number}" for number in range(5)]
MESSAGES = [
    Message(uuid=uuid, name="add", queue="mail", body=uuid.encode(), priority=number % 2)
    for number, uuid in enumerate(UUIDS)
]
SUBMISSION = Submission(
    token="t",
    messages=MESSAGES,
    states=[TaskState(task_uuid=uuid) for uuid in (*UUIDS, "last")],
    groups=[GroupMeta(group_uuid="group_1", task_uuids=UUIDS)],
)


def plain_submission() -> Submission:
    """What a chord of plain tasks is: made UUIDs, one queue, and the state of a callback more."""
    signatures = [Signature(name="add", uuid=new_uuid(), routing_key="mail") for _ in range(5)]
    states = [TaskState(task_uuid=one.uuid, task_name="add") for one in signatures]
    return Submission(
        token=new_uuid(""),
        messages=[
            Message(uuid=one.uuid, name="add", queue="mail", body=encode_signature(one))
            for one in signatures
        ],
        states=[*states, TaskState(task_uuid=new_uuid(), task_name="total")],
        groups=[GroupMeta(group_uuid=new_uuid("group_"), task_uuids=[])],
    )


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_steps, "STEP_ITEMS", 2)
    monkeypatch.setattr(redis_steps, "STAGED_AGE", 0)


@pytest.fixture
def driver(empty_redis: RedisServer) -> Iterator[RedisDriver]:
    driver = RedisDriver(empty_redis.url, clock=ManualClock())
    yield driver
    ask(driver, "CONFIG", "SET", "maxmemory", "0")
    driver.close()


class Counting(StagedSteps):
    """Notes what it stages."""

    def stage(self, token: str, *args: Any, **more: Any) -> int:
        self.staged = [*getattr(self, "staged", ()), token]
        return super().stage(token, *args, **more)


class FilledUp(StagedSteps):
    """Finds Redis full when all is staged."""

    def stage(self, *args: Any, **more: Any) -> int:
        count = super().stage(*args, **more)
        ask(self._driver, "CONFIG", "SET", "maxmemory", "1")
        return count


class Interrupted(StagedSteps):
    """Meets these commands of others when its submission is committed."""

    commands: tuple[str, ...] = ()

    def carry_out(self, token: str) -> None:
        ask(self._driver, *self.commands)
        super().carry_out(token)


def store(driver: RedisDriver) -> RedisStore:
    return RedisStore(RedisBroker(driver), RedisBackend(driver))


def ask(driver: RedisDriver, *words: str) -> Any:
    return driver.ask(*(word.encode() for word in words), doing="testing")


def waiting(driver: RedisDriver) -> list[bytes]:
    return [
        *ask(driver, "LRANGE", "mail", "0", "-1"),
        *ask(driver, "LRANGE", "mpy:{mail}:p:1", "0", "-1"),
    ]


def bodies(submission: Submission) -> list[bytes]:
    """Return them as `waiting` does."""
    return [one.body for one in sorted(submission.messages, key=lambda one: one.priority)]


BODIES = bodies(SUBMISSION)
KINDS = pytest.mark.parametrize(
    "make", [lambda: SUBMISSION, plain_submission], ids=["any", "plain"]
)


@KINDS
def test_steps_leave_what_one_script_leaves(
    empty_redis: RedisServer,
    driver: RedisDriver,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Submission],
) -> None:
    submission = make()
    assert is_plain(submission) is (make is plain_submission)
    beside = Beside(empty_redis.url)

    def left() -> tuple[dict[str, Any], set[str]]:
        keys, expires = beside.dump()
        return keys, set(expires)

    steps = Counting(driver, 3600)
    steps.most = 2
    in_store = store(driver)
    in_store._steps = steps
    in_store.submit(submission)
    in_store.submit(submission)  # a repeat
    assert steps.staged == [submission.token] * 2
    in_steps = left()
    ask(driver, "FLUSHDB")
    monkeypatch.setattr(redis_steps, "STEP_ITEMS", 1000)
    store(driver).submit(submission)

    assert in_steps == left()
    beside.close()


@pytest.mark.parametrize("when", ["before it is sent", "after its commit"])
def test_plain_step_leaves_a_task_that_has_ended_as_it_is(driver: RedisDriver, when: str) -> None:
    submission = plain_submission()
    uuid, backend = submission.states[0].task_uuid, store(driver).backend
    ended = TaskState(task_uuid=uuid, task_name="add", state=State.SUCCESS)

    class Meanwhile(StagedSteps):
        def carry_out(self, token: str) -> None:
            backend.apply([Change(key=uuid, states=[ended])])
            super().carry_out(token)

    if when == "before it is sent":
        backend.apply([Change(key=uuid, states=[ended])])
    kind = Meanwhile if when == "after its commit" else StagedSteps
    kind(driver, 3600).submit(submission, plain=True)

    assert backend.get_state(uuid).state is State.SUCCESS
    others = backend.get_states([one.task_uuid for one in submission.states[1:]])
    assert {one.state for one in others.values()} == {State.PENDING}
    assert waiting(driver) == [message.body for message in submission.messages]


def test_full_redis_refuses_what_is_not_committed(driver: RedisDriver) -> None:
    ask(driver, "CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(PublishRefused, match="memory"):
        store(driver).submit(SUBMISSION)

    assert ask(driver, "DBSIZE") == 0


def test_redis_that_is_full_at_the_commit_keeps_no_steps(driver: RedisDriver) -> None:
    with pytest.raises(PublishRefused, match="memory"):
        FilledUp(driver, 3600).submit(SUBMISSION)

    assert ask(driver, "DBSIZE") == 0


def test_name_refused_in_a_later_step_refuses_all(driver: RedisDriver) -> None:
    ask(driver, "SET", "jobs", "somebody else's")
    last = Message(uuid="last", name="add", queue="jobs", body=b"last")

    with pytest.raises(NameRefused, match="jobs"):
        store(driver).submit(msgspec.structs.replace(SUBMISSION, messages=[*MESSAGES, last]))

    assert ask(driver, "KEYS", "*") == [b"jobs"]


@KINDS
def test_full_redis_carries_out_what_is_committed(
    driver: RedisDriver, make: Callable[[], Submission]
) -> None:
    submission = make()
    interrupted = Interrupted(driver, 3600)
    interrupted.commands = ("CONFIG", "SET", "maxmemory", "1")

    interrupted.submit(submission, plain=is_plain(submission))

    assert waiting(driver) == bodies(submission)


@KINDS
def test_committed_steps_wait_for_their_queue_and_are_finished_by_others(
    driver: RedisDriver, make: Callable[[], Submission]
) -> None:
    submission = make()
    uuids = {one.task_uuid for one in submission.states}
    interrupted = Interrupted(driver, 3600)
    interrupted.commands = ("SET", "mail", "somebody else's")

    with pytest.raises(PublishUnknown, match="'mail' holds a string"):
        interrupted.submit(submission, plain=is_plain(submission))

    other = store(driver)
    other.tend()
    assert ask(driver, "GET", "mail") == b"somebody else's"
    assert ask(driver, "TTL", f"mpy:staged:{submission.token}") == -1
    assert other.backend.get_group(submission.groups[0].group_uuid) is not None
    ask(driver, "DEL", "mail")
    other.tend()
    assert waiting(driver) == bodies(submission)
    assert set(other.backend.get_states(list(uuids))) == uuids
    assert ask(driver, "KEYS", "mpy:staged:*") == []
    assert ask(driver, "EXISTS", "mpy:committed") == 0


def test_queue_limit_refuses_all_steps(driver: RedisDriver) -> None:
    limited = msgspec.structs.replace(SUBMISSION, limits=[QueueLimit("mail", 6, 5)])
    store(driver).submit(limited)

    with pytest.raises(QueueFull, match="mail"):
        store(driver).submit(msgspec.structs.replace(limited, token="another"))

    assert waiting(driver) == BODIES
    assert ask(driver, "KEYS", "mpy:staged:*") == []


def test_full_queue_refuses_before_anything_is_staged(driver: RedisDriver) -> None:
    limited = msgspec.structs.replace(SUBMISSION, limits=[QueueLimit("mail", 6, 5)])
    steps = Counting(driver, 3600)
    steps.submit(limited)

    with pytest.raises(QueueFull, match="mail"):
        steps.submit(msgspec.structs.replace(limited, token="another"))

    assert steps.staged == ["t"]
    steps.submit(limited)  # a repeat of what was stored is not refused
    assert waiting(driver) == BODIES


def test_staged_steps_expire_and_are_staged_anew(driver: RedisDriver) -> None:
    late = StagedSteps(driver, 3600)
    steps = late.stage("t", MESSAGES, SUBMISSION.states)
    assert 0 < ask(driver, "TTL", "mpy:staged:t") <= 600
    ask(driver, "DEL", "mpy:staged:t")

    with pytest.raises(PublishRefused, match="has expired"):
        driver.run(redis_steps.COMMIT, driver.now(), 3600, "t", steps, [], [], [], [])
    late.submit(SUBMISSION)

    assert waiting(driver) == BODIES


@pytest.mark.parametrize("expected", [None, b"another"])
def test_record_is_amended_with_all_messages_or_with_none(
    driver: RedisDriver, expected: bytes | None
) -> None:
    rider = Rider(name="flow", expected=expected, body=b"plan", life=60.0)

    amended = store(driver).submit(msgspec.structs.replace(SUBMISSION, riders=[rider]))

    assert amended is (expected is None)
    assert waiting(driver) == (BODIES if amended else [])
    assert store(driver).backend.claims(["flow"]) == [b"plan" if amended else None]
    assert (store(driver).backend.get_group("group_1") is not None) is amended
    assert ask(driver, "EXISTS", "mpy:committed") == 0


def test_members_of_a_large_settled_chord_expire_in_steps(driver: RedisDriver) -> None:
    uuids = [f"task_{number}" for number in range(STEP_ITEMS + 500)]
    backend = store(driver).backend
    backend.apply(
        [
            Change(
                key="group_1",
                states=[TaskState(task_uuid=uuid, state=State.SUCCESS) for uuid in uuids],
                arrivals=[
                    Arrival(
                        group_uuid="group_1",
                        task_uuid=uuid,
                        total=len(uuids),
                        ok=True,
                        callback=b"callback",
                    )
                    for uuid in uuids
                ],
            )
        ]
    )
    backend.apply([Change(key="group_1", fires="group_1")])
    assert ask(driver, "TTL", uuids[0]) > 3600

    backend.tend()

    for name in (*uuids, "mpy:g:{group_1}", "mpy:h:{group_1}"):
        assert 0 < ask(driver, "TTL", name) <= 3600
    assert ask(driver, "EXISTS", "mpy:loose") == 0
