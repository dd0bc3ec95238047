"""Shared by the machines: the pools for arguments, the passing of time, and the number of steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.scripts import Script
from tests.models.beside import Beside, Reading
from tests.models.messages import Queue, flight_of
from tests.support.servers import RedisServer

QUEUES = ("jobs", "{mail}.low")
SESSIONS = ("s1", "s2")
CONNECTIONS = ("11.a", "12.a", "13.a", "12.b")  # one of another life of the server
BODIES = (
    b'{"RoutingKey":"jobs"}',
    b'{"RoutingKey":"{mail}.low","ETA":null}',
    b'{"UUID":"u","Name":"n","RoutingKey":"jobs","Priority":3,"Immutable":true,"RetryCount":0}',
    b'{"UUID":"u","Name":"n","RoutingKey":"jobs","Args":[{"UUID":"v","Priority":9,"Immutable":true,'
    b'"RetryCount":0}],"Priority":256,"Immutable":true,"RetryCount":0}',
    b"plain",
    b"\xff\x00\n 1 2",
    b"",
)
LABELS = (b"", b"", b"", b"\x92\xa1u\xa1n", b"a\nlabel")
START = 1_790_000_000_000_000  # µs
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "0"))  # 0: few, and the same each time
SHRINK = os.environ.get("MODEL_SHRINK", "1") != "0"  # it takes minutes

Queues = st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2, unique=True)
Queue1 = st.sampled_from(QUEUES)
Session1 = st.sampled_from(SESSIONS)
Pick = st.integers(0, 9)  # one of those that there are
Passed = st.sampled_from([0, 0, 0, 1, 200_000, 250_000, 1_000_000, 30_000_000, -500_000])  # µs
Priority = st.sampled_from([0, 0, 0, 0, 3, 9])
Due = st.sampled_from(
    [None, None, None, -5_000_000, 0, 1, 500_000, 1_099_999, 1_100_000, 20_000_000]
)  # µs from now
Token = st.sampled_from(["", "", "t1", "t2"])
Room = st.sampled_from([None, None, None, 0, 2])  # messages that may wait in a queue
Messages = st.lists(
    st.tuples(
        Queue1,
        Priority,
        Due,
        st.sampled_from(LABELS),
        st.sampled_from([0, 0, 0, 2]),
        st.sampled_from(BODIES),
    ),
    max_size=4,
)
Fate = st.sampled_from(["done", "done", "back", "later", "wait", "dead"])


class ScriptMachine(RuleBasedStateMachine):
    """A database, its model, and a clock that the rules move."""

    url = ""
    names: Sequence[str] = QUEUES  # of the queues that there are

    def __init__(self) -> None:
        super().__init__()
        self.beside = self.open()
        self.model = self.beside.model
        self.now = START
        self.epochs: list[int] = []  # that were given

    def open(self) -> Beside:
        return Beside(self.url)

    def teardown(self) -> None:
        self.beside.close()

    def passed(self, micros: int) -> str:
        self.now += micros
        return str(self.now)

    def epoch(self, back: int) -> int:
        """Return the last epoch (1) or the one before (2), one that nobody has, or 0."""
        return self.epochs[-back] if 0 < back <= len(self.epochs) else back

    def key(self, name: str) -> str:
        """What a key that belongs to no queue is called."""
        return name

    def run(
        self, script: Script, model: Any, *values: Any, reading: Reading = lambda reply: reply
    ) -> Any:
        return self.beside.run(script, model, *values, reading=reading)

    def queue(self, drawn: str) -> Queue:
        """As the scripts take it; another if there is none of that name."""
        return queue_keys(drawn if drawn in self.names else self.names[0])

    def queues(self, drawn: Iterable[str]) -> list[Queue]:
        return list(dict.fromkeys(map(self.queue, drawn)))

    @property
    def keys(self) -> list[Queue]:
        """Of all queues."""
        return self.queues(self.names)

    def messages(self, drawn: list[Any]) -> tuple[list[Queue], list[Any]]:
        """(queues, messages) as the scripts take them."""
        queues = self.queues(one[0] for one in drawn)
        rows = [
            (
                queues.index(self.queue(name)),
                level,
                0 if due is None else self.now + due,
                raw(label),
                parks,
                raw(body),
            )
            for name, level, due, label, parks, body in drawn
        ]
        return queues, rows

    def held(self, session: str) -> list[tuple[int, str]]:
        """(place of the queue, receipt) of what a session has in flight."""
        return [
            (place, receipt)
            for place, queue in enumerate(self.keys)
            for receipt in sorted(self.model.fields(flight_of(queue, session)), key=int)
        ]

    def delivery(self, session: str, pick: int) -> tuple[int, str]:
        """One of those that the session holds, and now and then one that it does not."""
        held = self.held(session)
        return held[pick % len(held)] if held and pick else (pick % len(self.names), "999")

    def holder(self, session: str) -> str:
        """The session, or another if it holds nothing."""
        return next((one for one in (session, *SESSIONS) if self.held(one)), session)

    def spoil(self, key: str, kind: str) -> None:
        """Somebody keeps something else under a key."""
        self.beside.both("DEL", key)
        match kind:
            case "string":
                self.beside.both("SET", key, "spoilt")
            case "list":
                self.beside.both("RPUSH", key, "spoilt")
            case "set":
                self.beside.both("SADD", key, "spoilt")


def run_machine(
    machine: type[ScriptMachine], server: RedisServer, *, examples: int, steps: int
) -> None:
    there = type(machine.__name__, (machine,), {"url": server.url})
    run_state_machine_as_test(
        there,
        settings=settings(
            max_examples=EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not EXAMPLES,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
        ),
    )
