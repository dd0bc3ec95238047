"""The steps of a machine that a broker takes: each script with arguments from small pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from machinery_py.brokers.redis import scripts as redis_scripts
from machinery_py.brokers.redis.mover import ANY
from machinery_py.connections.redis.client import raw
from tests.models import broker
from tests.models.beside import text, unpacked
from tests.models.machine import (
    BODIES,
    CONNECTIONS,
    QUEUES,
    Due,
    Fate,
    Messages,
    Passed,
    Pick,
    Queue1,
    Queues,
    Room,
    ScriptMachine,
    Session1,
    Token,
)
from tests.models.messages import DELAYED
from tests.models.redis import Zset


def packed(reply: Any) -> Any:
    """A reply that is msgpack."""
    return text(unpacked(reply.encode("latin-1"))) if reply != "WRONGTYPE" else reply


def claimed(reply: Any) -> Any:
    """A claim's, with a row for each delivery."""
    if reply == "WRONGTYPE":
        return reply
    bodies = iter(reply[7])
    rows = [
        [place, first + i, fence, strikes, parks, level, wait, next(bodies)]
        for place, first, fence, strikes, parks, level, wait, count in packed(reply[4])
        for i in range(count)
    ]
    assert not list(bodies)
    return [*reply[:4], rows, reply[5], keys_in(reply[6]), reply[8]]


def keys_in(problems: Sequence[str]) -> list[str]:
    """The keys that the texts of a script name."""
    return [text.partition("WRONGTYPE ")[2].partition(" holds ")[0] for text in problems]


class Arrivals(ScriptMachine):
    """How messages come, are claimed, and come back: what settlement needs as well."""

    claims = 0

    @initialize()
    def two_sessions(self) -> None:
        for session in ("s1", "s2"):
            self.run(
                redis_scripts.REGISTER,
                broker.register,
                str(self.now),
                session,
                raw(b"record"),
                self.keys,
            )

    @rule(passed=Passed, token=Token, messages=Messages, room=Room)
    def put(self, passed: int, token: str, messages: list[Any], room: int | None) -> None:
        now = self.passed(passed)
        queues, rows = self.messages(messages)
        limits = [] if room is None else [(place, room) for place in range(len(queues))]
        self.run(redis_scripts.PUT, broker.put_messages, now, token, limits, queues, rows)

    @rule(
        passed=Passed,
        session=Session1,
        queues=Queues,
        limit=st.integers(1, 5),
        lost=st.lists(st.integers(1, 3), max_size=2, unique=True),
        number=st.sampled_from(CONNECTIONS),
        will_sleep=st.booleans(),
        noted=st.booleans(),
        timed=st.booleans(),
        known=st.sampled_from([0, 0, 0, 7]),
    )
    def claim(
        self,
        passed: int,
        session: str,
        queues: list[str],
        limit: int,
        lost: list[int],
        number: str,
        will_sleep: bool,
        noted: bool,
        timed: bool,
        known: int = 0,
    ) -> None:
        now, self.claims = self.passed(passed), self.claims + 1
        lost = [self.claims - one for one in lost]
        keys = self.queues(queues)
        self.run(
            redis_scripts.CLAIM,
            broker.claim,
            now,
            session,
            keys,
            limit,
            self.claims,
            lost,
            number,
            will_sleep,
            noted,
            timed,
            "mpy:fence",
            [known] * len(keys),
            reading=claimed,
        )

    @rule(passed=Passed, session=Session1, messages=Messages)
    def a_session_gets_messages(self, passed: int, session: str, messages: list[Any]) -> None:
        self.register(passed, session, list(self.names))
        self.put(0, "", messages, None)
        self.claim(0, session, list(self.names), 5, [], "11.a", False, False, True)

    @rule(passed=Passed, session=Session1, pick=Pick)
    def a_session_dies(self, passed: int, session: str, pick: int) -> None:
        session = self.holder(session)
        self.begin(session, pick)
        self.condemn(passed, session, None, "")
        self.a_session_gets_messages(0, session, [])

    @rule(
        passed=Passed,
        session=Session1,
        pick=st.none() | Pick,
        seen=st.sampled_from(["", "", "1", "now"]),
    )
    def condemn(self, passed: int, session: str, pick: int | None, seen: str) -> None:
        now = self.passed(passed)
        began: list[list[str]] | bool = False
        if pick is not None:
            place, receipt = self.delivery(session, pick)
            began = [[receipt] if index == place else [] for index in range(len(self.keys))]
        tombstone = redis_scripts.CLOSED if began else redis_scripts.TOMBSTONE
        seen = now if seen == "now" else seen
        self.run(
            redis_scripts.CONDEMN, broker.condemn, now, session, self.keys, seen, began, tombstone
        )

    @rule(passed=Passed, session=Session1, queues=Queues)
    def register(self, passed: int, session: str, queues: list[str]) -> None:
        keys = self.queues(queues)
        self.run(
            redis_scripts.REGISTER,
            broker.register,
            self.passed(passed),
            session,
            raw(b"again"),
            keys,
        )

    @rule(session=Session1, pick=Pick)
    def begin(self, session: str, pick: int) -> None:
        place, receipt = self.delivery(session, pick)
        self.run(redis_scripts.BEGIN, broker.begin, session, self.keys[place][1], receipt)

    @rule(
        key=st.sampled_from([*QUEUES, DELAYED]),
        kind=st.sampled_from(["string", "set", "list", *["none"] * 4]),
    )
    def spoil_a_key_of_go(self, key: str, kind: str) -> None:
        if kind != "none":
            self.spoil(self.key(key), kind)
            return
        for one in (*QUEUES, self.key(DELAYED)):
            if self.model.keys.get(one) in ("spoilt", ["spoilt"], {"spoilt"}):
                self.spoil(one, "none")

    @rule(queue=Queue1)
    def pause(self, queue: str) -> None:
        self.run(redis_scripts.PAUSE, broker.pause, self.queue(queue))

    @rule(queue=Queue1)
    def resume(self, queue: str) -> None:
        self.run(redis_scripts.RESUME, broker.resume, self.queue(queue))


class BrokerMachine(Arrivals):
    """All scripts of the broker."""

    @rule(passed=Passed, session=Session1, queues=Queues, stalled=st.booleans())
    def beat(self, passed: int, session: str, queues: list[str], stalled: bool) -> None:
        keys = self.queues(queues)
        self.run(redis_scripts.BEAT, broker.beat, self.passed(passed), session, keys, stalled)

    @rule(
        passed=Passed,
        session=Session1,
        ends=st.lists(st.tuples(Pick, Fate, Due), min_size=1, max_size=4),
    )
    def dispose(self, passed: int, session: str, ends: list[Any]) -> None:
        now, session = self.passed(passed), self.holder(session)
        rows = [
            (
                *self.delivery(session, pick),
                fate,
                max(0, left or 0),
                raw(b"head"),
            )
            for pick, fate, left in ends
        ]
        self.run(redis_scripts.DISPOSE, broker.dispose, now, session, self.keys, rows)

    @rule(session=Session1, picks=st.lists(Pick, max_size=3))
    def holds(self, session: str, picks: list[int]) -> None:
        deliveries = [self.delivery(session, pick) for pick in picks]
        held = [(self.keys[place][1], receipt) for place, receipt in deliveries]
        self.run(redis_scripts.HOLDS, broker.holds, session, held)

    @rule(session=Session1, queue=Queue1, body=st.sampled_from(BODIES))
    def a_sleeper_is_given_a_message(self, session: str, queue: str, body: bytes) -> None:
        """What BLMOVE does, whether the session is still there or not."""
        self.beside.both("RPUSH", f"{self.queue(queue)[1]}i:{session}", body.decode("latin-1"))

    @rule(passed=Passed, lease=st.sampled_from([0, 1_000_000, 10_000_000]))
    def look(self, passed: int, lease: int) -> None:
        self.run(redis_scripts.LOOK, broker.look, self.passed(passed), self.keys, lease)

    @rule(
        passed=Passed,
        limit=st.integers(1, 3),
        room=st.sampled_from([0, 1, ANY]),
        queue=Queue1,
        level=st.sampled_from([0, 0, 3]),
        late=st.lists(
            st.tuples(st.sampled_from(BODIES), st.sampled_from([-20_000_000, 0, 1])), max_size=4
        ),
    )
    def move_what_is_due(
        self,
        passed: int,
        limit: int,
        room: int,
        queue: str,
        level: int,
        late: list[tuple[bytes, int]],
    ) -> None:
        now, delayed = self.passed(passed), self.key(DELAYED)
        for body, due in late if isinstance(self.model.keys.get(delayed, Zset()), Zset) else ():
            self.beside.both("ZADD", delayed, f"{self.now + due}000", body.decode("latin-1"))
        reply = self.run(redis_scripts.DUE, broker.due, now, limit, room)
        bodies = ["plain"] if reply == "WRONGTYPE" else reply[2]
        rows = [
            (0, level, 0, raw(b""), 0, raw(body.encode("latin-1"))) for body in [*bodies, "gone"]
        ]
        self.run(redis_scripts.MOVE, broker.move, now, [self.queue(queue)], rows)
        for body in (*bodies[:1], "gone"):
            self.run(
                redis_scripts.BURY_DELAYED,
                broker.bury_due,
                now,
                self.queue(queue),
                raw(body.encode("latin-1")),
                raw(b"head"),
            )
